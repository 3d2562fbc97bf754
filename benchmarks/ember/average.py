"""Averages the weights of model folders that began with the same ones: what a short training disturbed comes back, and what
it taught stays. It knows no model, only tensors."""

import argparse
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor


def averaged(parts: list[tuple[dict[str, Tensor], float]]) -> dict[str, Tensor]:
    """The weighted mean of each tensor, computed in float32 and kept in the first part's dtype."""
    total = sum(share for _, share in parts)
    return {
        name: sum((tensors[name].float() * (share / total) for tensors, share in parts), first.float() * 0).to(
            first.dtype
        )
        for name, first in parts[0][0].items()
    }


def part(said: str) -> tuple[Path, float]:
    """FOLDER or FOLDER=SHARE, as the command line says it."""
    folder, _, share = said.partition("=")
    return Path(folder), float(share or 1)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ember.average",
        description="Writes a model whose weights are the average of others' and whose other files are the first one's.",
    )
    parser.add_argument("folder", type=Path, help="where the model is written")
    parser.add_argument(
        "parts", type=part, nargs="+", metavar="FOLDER[=SHARE]", help="a model folder and its share of the sum"
    )
    asked = parser.parse_args()
    tensors = averaged([(load_file(folder / "model.safetensors"), share) for folder, share in asked.parts])
    shutil.copytree(asked.parts[0][0], asked.folder, dirs_exist_ok=True)
    save_file(tensors, asked.folder / "model.safetensors", metadata={"format": "pt"})
    print(f"wrote {asked.folder / 'model.safetensors'}")


if __name__ == "__main__":
    main()
