"""Queued requests: taking, sealing, running and answering them."""
