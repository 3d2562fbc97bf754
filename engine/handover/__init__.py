"""KV blocks on their way from one replica to another: what both sides say, hold and let go."""
