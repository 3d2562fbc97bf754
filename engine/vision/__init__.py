"""Encoders of images: config, checkpoint names, forward passes."""
