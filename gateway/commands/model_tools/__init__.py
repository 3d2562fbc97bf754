"""What `hearth models` and `hearth doctor` do with models: add, warm, compress, check and size them."""
