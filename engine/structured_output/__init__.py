"""Grammars: what a caller's source says, compiling it within limits, and which tokens it allows next."""
