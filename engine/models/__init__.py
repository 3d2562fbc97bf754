"""Architectures: config, parameters, checkpoint names, and the forward pass over a step."""
