"""Ember, the built-in model: the text it learns from, its tokenizer, its training and its measure."""
