"""Gives memory that was freed back to the system."""

import ctypes
import sys
from contextlib import suppress

import torch


def trim_memory(device: torch.device) -> None:
    """Returns memory to the system that was freed, and that torch or the C library keep for later allocations."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.empty_cache()
    elif sys.platform == "linux":
        with suppress(AttributeError):  # of another C library than glibc
            ctypes.CDLL(None).malloc_trim(0)
