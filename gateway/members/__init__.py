"""Where a gateway learns which machines there are."""
