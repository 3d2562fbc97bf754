"""Runs steps: opens a model, launches, lands, sleeps and measures. It does not know why these slices run."""
