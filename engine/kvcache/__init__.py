"""The cache's tensors, and the tiers below the device."""
