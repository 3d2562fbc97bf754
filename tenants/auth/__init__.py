"""Authentication: API tokens and JSON Web Tokens."""
