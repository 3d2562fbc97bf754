"""What processes say to each other: frames, addresses and framing. It knows no sockets' owners and no torch."""
