"""One Store protocol, two implementations, and the one decision that both take."""
