"""Lets a kernel begin while the one before it ends (programmatic dependent launch, from Hopper on).

A kernel launched with `launch_pdl=supports_pdl(device)` calls `wait` in every program before it touches anything that a
kernel writes: then all kernels before it are done and visible, not just the last. `release` lets the next kernel begin
as soon as every program has called it; what that one reads after its own `wait` is complete all the same. Without
support, and in the interpreter, both do nothing.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@cache
def supports_pdl(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def wait():
    if tl.target_info.cuda_capability_geq(9):
        gdc_wait()


@triton.jit
def release():
    if tl.target_info.cuda_capability_geq(9):
        gdc_launch_dependents()
