"""Encodes the images of prompts."""
