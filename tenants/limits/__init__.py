"""Limits of callers: reserved before a call and settled after it."""
