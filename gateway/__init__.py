"""The gateway: HTTP in, frames out. It authenticates, meters, routes and streams; it never sees tensors."""

__version__ = "0.2.0.dev0"  # of the whole distribution: pyproject.toml reads it here
