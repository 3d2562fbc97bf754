"""Images of requests: where they come from, how a model takes them, and their decoding in a process of its own."""
