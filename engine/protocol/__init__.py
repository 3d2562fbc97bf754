"""The messages between processes: frames, addresses and framing. It knows no sockets' owners and no torch."""
