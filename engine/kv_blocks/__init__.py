"""Which KV blocks there are, who has them, and which prefixes are found."""
