"""What `hearth` does, one module per command."""
