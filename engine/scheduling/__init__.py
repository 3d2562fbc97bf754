"""Who runs in the next step, and where its KV blocks are. It is pure: it knows no torch and no sockets."""
