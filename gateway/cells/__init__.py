"""Cells that lend each other quotas: who they are, what they say, and both sides of the line between them."""
