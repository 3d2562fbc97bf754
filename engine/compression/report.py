"""What became of a folder's tensors, for people and as JSON. It does nothing to them."""

from collections.abc import Iterator
from typing import Final

import msgspec

BF12_KIND: Final = "bf12"


class TensorReport(msgspec.Struct, frozen=True):
    """What became of a tensor. `kind` is bf12, or the dtype of a tensor that stays as it is for the `reason`. `escapes`
    is None where they were not counted; a tensor that stays has those that it would have."""

    name: str
    file: str
    shape: tuple[int, ...]
    kind: str
    escapes: int | None
    escape_rate: float | None
    bytes_before: int
    bytes_after: int
    reason: str


class CompressionReport(msgspec.Struct, frozen=True):
    """What became of a folder. `bytes_before` and `bytes_after` are of the weights' files. Without a target nothing was
    written, and `bytes_after` is an estimate that is right within some thousandths."""

    source: str
    target: str | None
    level: str
    tensors: list[TensorReport]
    bytes_before: int
    bytes_after: int
    copied_files: int
    seconds: float

    @property
    def bf12_share(self) -> float:
        """The share of all tensors' bytes that is in 12 bits a number."""
        bf12_bytes = sum(tensor.bytes_before for tensor in self.tensors if tensor.kind == BF12_KIND)
        return bf12_bytes / max(1, sum(tensor.bytes_before for tensor in self.tensors))


class ExpansionReport(msgspec.Struct, frozen=True):
    """What became of a compressed folder. `bytes_before` and `bytes_after` are of the weights' files."""

    source: str
    target: str
    files: int
    bytes_before: int
    bytes_after: int
    seconds: float

    @property
    def line(self) -> str:
        files = "1 file" if self.files == 1 else f"{self.files} files"
        return f"{files} of weights as they were, every sum as it was noted: {_sizes(self)}"


def format_report(report: CompressionReport) -> Iterator[str]:
    """A table of the tensors, and a line of totals."""
    width = max((len(tensor.name) for tensor in report.tensors), default=0)
    for tensor in report.tensors:
        escapes = "" if tensor.escapes is None else f"{tensor.escape_rate or 0.0:.4%} escapes ({tensor.escapes:,})"
        shape = "×".join(map(str, tensor.shape)) or "a number"
        size = f"{format_bytes(tensor.bytes_before):>9} → {format_bytes(tensor.bytes_after):>9}"
        description = f"{tensor.name:{width}}  {shape:>14}  {tensor.kind:5}  {size}"
        yield "  ".join(part for part in (description, escapes, tensor.reason) if part)
    share = report.bytes_after / max(1, report.bytes_before)
    verb = "would be" if report.target is None else "are"
    bf12 = f"{report.bf12_share:.1%} of the weights {verb} in 12 bits"
    yield f"{bf12}, and all {share:.1%} of what they were: {_sizes(report)}"


def format_bytes(count: float) -> str:
    """1536 → `1.50 KiB`."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


def _sizes(report: CompressionReport | ExpansionReport) -> str:
    rate = max(report.bytes_before, report.bytes_after) / 1e9 / max(report.seconds, 1e-3)
    sizes = f"{format_bytes(report.bytes_before)} → {format_bytes(report.bytes_after)}"
    return f"{sizes} in {report.seconds:.1f} s ({rate:.2f} GB/s of bf16)"
