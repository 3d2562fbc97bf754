"""Tenants: accounts, their ApiTokens, quotas and usage. It knows neither HTTP routes nor engines."""
