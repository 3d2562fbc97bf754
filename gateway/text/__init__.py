"""Text to tokens of one model folder, and back."""
