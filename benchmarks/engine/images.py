"""How long a GPU takes for a picture of five tiles, of Llama 4 Scout's encoder with random weights: from pixels in host
memory to the rows that the decoder takes, in host memory again.

    python -m benchmarks.engine.images [--tiles 5] [--rounds 30]
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch

from benchmarks.record import record
from engine.bench.geometries import FLOP_PER_S, GEOMETRIES
from engine.images.gpu_images import GpuImageEncoder
from engine.memory.streams import DeviceStream
from engine.models.decoder_config import VisionConfig
from engine.vision.encoders import make_vision_encoder
from engine.vision.families import read_vision_config, vision_entries
from engine.weights.formats import plain_formats
from engine.weights.random import random_tensors

VISION: Final[dict[str, Any]] = {
    "hidden_size": 1408, "num_hidden_layers": 34, "num_attention_heads": 16, "intermediate_size": 5632,
    "image_size": 336, "patch_size": 14, "vision_output_dim": 4096, "projector_input_dim": 4096,
    "projector_output_dim": 4096,
}  # fmt: skip


def scout_vision() -> VisionConfig:
    with TemporaryDirectory() as folder:
        config = {"architectures": ["Llama4ForConditionalGeneration"], "vision_config": VISION}
        (Path(folder) / "config.json").write_text(json.dumps(config))
        vision = read_vision_config(Path(folder))
    assert vision is not None
    return vision


def bound_ms(vision: VisionConfig, parameters: int, tiles: int) -> float:
    """What the matmuls and attention of so many tiles compute, ÷ the rate of bf16 matmuls."""
    patches = vision.grid**2 + 1
    attention = 4 * vision.layers * vision.hidden * patches**2
    return 1e3 * tiles * (2 * parameters * patches + attention) / FLOP_PER_S


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine.images", description=__doc__)
    parser.add_argument("--tiles", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=30)
    asked = parser.parse_args()
    device, vision, hidden = torch.device("cuda"), scout_vision(), GEOMETRIES["scout"]["hidden_size"]
    table = vision_entries(vision, hidden, None)
    assert table is not None
    tensors = random_tensors(table, plain_formats(table, torch.bfloat16), device, lambda: None)
    numbers = sum(tensor.numel() for tensor in tensors.values())
    encoder = make_vision_encoder(vision, tensors, lambda: None)
    rows_EH = torch.zeros(asked.tiles * vision.tokens, hidden, device=device, dtype=torch.bfloat16)
    images = GpuImageEncoder(vision, encoder, rows_EH, DeviceStream(device))
    pixels = [torch.randint(256, (vision.side, vision.side, 3), dtype=torch.uint8).numpy().tobytes()] * asked.tiles
    took = []
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for _ in range(asked.rounds):
        began = time.perf_counter()
        images.encode(pixels)
        took.append(1e3 * (time.perf_counter() - began))
    taken = torch.cuda.max_memory_allocated() - before
    print(f"{taken >> 20} MiB meanwhile, {images.encoding_bytes >> 20} MiB are left free for it")
    value = statistics.median(took[3:])
    record("h200_mixtures", f"scout-image-{asked.tiles}", value, "ms", bound=bound_ms(vision, numbers, asked.tiles))


if __name__ == "__main__":
    sys.exit(main())
