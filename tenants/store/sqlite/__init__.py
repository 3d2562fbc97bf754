"""The store in one SQLite file, for one gateway."""
