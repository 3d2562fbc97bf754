"""How commands reach what they act on: the store, a gateway, and the machines. It prints nothing of its own."""
