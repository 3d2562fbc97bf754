"""Bytes: address ranges, pinned host memory, streams, workspace and scrubbing. It does not know what lies in them."""
