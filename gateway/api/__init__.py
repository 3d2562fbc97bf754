"""The dialects: bodies in, bodies out."""
