"""The models that tenants may call."""
