"""Records of tenants: plain structs, and what their fields mean."""
