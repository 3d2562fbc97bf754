"""The gateway: HTTP in, frames out. It authenticates, meters, routes and streams; it never sees tensors."""
