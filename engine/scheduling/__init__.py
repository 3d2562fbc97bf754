"""Decides which sequences run in the next step, and where their KV blocks are. It knows neither torch nor sockets."""
