"""The store in Redis, for many gateways."""
