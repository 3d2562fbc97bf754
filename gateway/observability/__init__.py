"""Metrics, logs, traces and alert rules."""
