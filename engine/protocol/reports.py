"""Reports of a process on its work in a file or on its output: its memory, an inspected folder, a warmed model."""

import contextlib
import json
import os
from pathlib import Path
from typing import Final

import msgspec

MEMORY_REPORT_SUFFIX: Final = ".memory.json"
WEIGHT_FILES: Final = "*.safetensors"


class MemoryReport(msgspec.Struct, frozen=True, kw_only=True):
    """Where a replica's memory went, in bytes, as it began to serve: a JSON file beside its heartbeat."""

    model: str
    pid: int
    device: str  # as the driver names it, or cpu
    device_bytes: int  # all that the device has, others' share included
    weights_bytes: int
    coded_bytes: int = 0  # of these, what is in 12 bits a number
    bf16_bytes: int = 0  # what the weights would take without that; 0: as much as they do
    kv_blocks: int
    kv_block_tokens: int
    kv_bytes: int
    workspace_bytes: int = 0  # what a step needs beside these
    graphs_bytes: int = 0
    free_bytes: int  # left to nobody
    note: str = ""  # what people are to know: a setting that could not be followed, and what is done instead
    folder: str = ""  # that was read,
    weights: str = ""  # and a fingerprint of its WEIGHT_FILES as they were then; empty: it does not tell


class InspectionReport(msgspec.Struct, frozen=True, kw_only=True):
    """A folder's weights as `python -m engine.weights.validate` reads them from headers alone."""

    numbers: int  # that a replica would load
    coded_numbers: int = 0  # of these, in 12 or 8 bits each where a GPU has the others in bfloat16
    coded_bytes: int = 0  # what these take there
    image_numbers: int = 0  # beside them, what encodes images, which replicas on a CPU load


class WarmupReport(msgspec.Struct, frozen=True, kw_only=True):
    """The files that starts of a model take over, which `python -m engine.replica.warmup` found or prepared."""

    needed: bool  # there is something that later starts would have to find out
    found: bool  # it was there already
    seconds: float
    files: list[str] = []  # where it is now


def memory_report_path(heartbeat: str | os.PathLike[str]) -> Path:
    """The report of the replica that beats in this file."""
    return Path(heartbeat).with_suffix(MEMORY_REPORT_SUFFIX)


def loading_percent(line: str) -> int | None:
    """How much of its weights a replica has read, where the line of its log says that."""
    if '"event": "loading"' not in line:
        return None
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return int(json.loads(line)["percent"])
    return None
