"""From files to parameters on a device. It does not know what runs them."""
