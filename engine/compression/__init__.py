"""A model's folder in 12 bits a number, and the way back, as programs of their own. It loads and runs no model."""
