"""hearth.toml: its tables, how it is read, and its reference."""
