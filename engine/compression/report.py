"""What became of a folder's tensors, for people and as JSON. It does nothing to them."""

from collections.abc import Iterator
from typing import Final

import msgspec

BF12_KIND: Final = "bf12"


class TensorReport(msgspec.Struct, frozen=True):
    """`kind` is bf12, or of a tensor that is kept its dtype, for the `reason`. `escapes` is None where nobody counted
    them; a kept tensor's are those that it would have."""

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
    """`bytes_before` and `bytes_after` are of the weights' files. Without a target nothing was written, and what would
    be is estimated, within some thousandths of it."""

    source: str
    target: str | None
    level: str
    tensors: list[TensorReport]
    bytes_before: int
    bytes_after: int
    copied_files: int
    seconds: float

    @property
    def coded_share(self) -> float:
        """Of the bytes of all tensors, those that are coded."""
        coded = sum(tensor.bytes_before for tensor in self.tensors if tensor.kind == BF12_KIND)
        return coded / max(1, sum(tensor.bytes_before for tensor in self.tensors))


class ExpansionReport(msgspec.Struct, frozen=True):
    """`bytes_before` and `bytes_after` are of the weights' files."""

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
    """A table of the tensors, and what it comes to."""
    width = max((len(tensor.name) for tensor in report.tensors), default=0)
    for tensor in report.tensors:
        escapes = "" if tensor.escapes is None else f"{tensor.escape_rate or 0.0:.4%} escapes ({tensor.escapes:,})"
        shape = "×".join(map(str, tensor.shape)) or "a number"
        size = f"{format_bytes(tensor.bytes_before):>9} → {format_bytes(tensor.bytes_after):>9}"
        found = f"{tensor.name:{width}}  {shape:>14}  {tensor.kind:5}  {size}"
        yield "  ".join(part for part in (found, escapes, tensor.reason) if part)
    share = report.bytes_after / max(1, report.bytes_before)
    would = "would be" if report.target is None else "are"
    coded = f"{report.coded_share:.1%} of the weights {would} in 12 bits"
    yield f"{coded}, and all {share:.1%} of what they were: {_sizes(report)}"


def format_bytes(count: float) -> str:
    """1536 → `1.50 KiB`."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


def _sizes(done: CompressionReport | ExpansionReport) -> str:
    rate = max(done.bytes_before, done.bytes_after) / 1e9 / max(done.seconds, 1e-3)
    sizes = f"{format_bytes(done.bytes_before)} → {format_bytes(done.bytes_after)}"
    return f"{sizes} in {done.seconds:.1f} s ({rate:.2f} GB/s of bf16)"
