"""engine/device.py and what it launches: the GPU's path, on the CPU by Triton's interpreter and on a GPU.

The interpreter knows no streams, events and graphs; all else is the same code.
"""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.batch import Segment, Slice, pack, unpack
from engine.device import Device, Most
from engine.kv import KvPool, KvShape
from engine.model.config import read_config
from engine.model.device import Space
from engine.runner import _parameters
from engine.streams import Stream
from engine.weights import assembly
from engine.weights.resident import Resident
from engine.wire import Sampling
from tests.engine.small import BLOCK_TOKENS, FAMILIES, Text, reference_model, saved, spec

GREEDY = Sampling()
CONTEXT_TOKENS = 256
BLOCKS = 64
CPU = torch.device("cpu")
INTERPRETED = ("llama 3.1", "llama biases", "mistral window", "qwen3 biases window")


@torch.inference_mode()
def interpreted(folder: Path, **changes: Any) -> Device:
    """A device whose kernels run in the interpreter. Every slot is NaN until it is written."""
    config = read_config(folder)
    with patch.object(assembly, "_stored", Resident):
        parameters, _ = _parameters(spec(folder, **changes), config, torch.float32, CPU, lambda: None)
    most = Most.of(8, 128, CONTEXT_TOKENS, BLOCK_TOKENS)
    space = Space.make(config, CPU, most.words, most.rows, most.sequences, CONTEXT_TOKENS)
    pool = KvPool(KvShape.of(config, BLOCK_TOKENS, torch.float32), BLOCKS, CPU)
    for rows in pool.layers:
        rows.fill_(float("nan"))
    return Device(config, parameters, pool, space, Stream(CPU), most, graph_rows=0)


@torch.inference_mode()
def logits(device: Device, slices: list[Slice], segments: list[Segment] | None = None) -> Tensor:
    packed = pack(slices, BLOCK_TOKENS, segments or [])
    return device.logits(packed, unpack(packed))


@torch.inference_mode()
def launch(device: Device, slices: list[Slice]) -> Any:
    packed = pack(slices, BLOCK_TOKENS)
    return device.launch(packed, unpack(packed))


def texts(lengths: list[int], vocabulary: int) -> list[Text]:
    rng = np.random.default_rng(3)
    blocks = iter(rng.permutation(BLOCKS).tolist())
    return [
        Text(rng.integers(0, vocabulary, length).tolist(), [next(blocks) for _ in range(-(-length // BLOCK_TOKENS))])
        for length in lengths
    ]


@pytest.mark.parametrize("family", INTERPRETED)
def test_logits_agree_with_the_reference_library(family: str, tmp_path: Path) -> None:
    reference = reference_model(family)
    device = interpreted(saved(reference, tmp_path))
    one, other, third = texts([1, 60, 75], 160)
    with torch.no_grad():
        wanted = [reference(torch.tensor([text.ids])).logits[0] for text in (one, other, third)]
    steps = [[(other, 20), (third, 33)], [(one, 1), (other, 1), (third, 1)], [(other, 39), (third, 41)]]
    for step in steps:
        found = logits(device, [text.slice(count, GREEDY) for text, count in step])
        rows = [
            logits_TV[text.computed - 1]
            for text, logits_TV in zip((one, other, third), wanted, strict=True)
            if any(text is taken for taken, _ in step)
        ]
        assert (found - torch.stack(rows)).abs().max().item() <= 1e-4


def test_segments_change_nothing_but_the_order_of_adding_up(tmp_path: Path) -> None:
    device = interpreted(saved(reference_model("llama 3.1"), tmp_path))
    first, second, third = texts([40, 40, 40], 160)
    second.ids[:32], third.ids[:32] = first.ids[:32], first.ids[:32]
    logits(device, [first.slice(39, GREEDY)])
    for text in (second, third):
        text.blocks[:2], text.computed = first.blocks[:2], 32
    logits(device, [second.slice(7, GREEDY), third.slice(7, GREEDY)])
    slices = [text.slice(1, GREEDY) for text in (first, second, third)]
    alone = logits(device, slices)
    grouped = logits(device, slices, [Segment([0, 1, 2], 0, 32)])
    assert (alone - grouped).abs().max().item() <= 1e-5
    assert not torch.equal(alone, grouped), "the segment was not used"


def test_a_token_of_the_flight_before_is_read_where_it_was_sampled(tmp_path: Path) -> None:
    device = interpreted(saved(reference_model("qwen3"), tmp_path))
    one, other = texts([5, 9], 160)
    flight = launch(device, [one.slice(5, GREEDY), other.slice(9, GREEDY)])
    next_one = [Slice([-2], 9, [*other.blocks], GREEDY), Slice([-1], 5, one.blocks, GREEDY)]
    following = launch(device, next_one)
    first = flight.wait().tokens_R
    found = following.wait().tokens_R
    known = [Slice([int(first[1])], 9, other.blocks, GREEDY), Slice([int(first[0])], 5, one.blocks, GREEDY)]
    assert launch(device, known).wait().tokens_R.tolist() == found.tolist()


def test_a_token_that_no_row_sampled_is_not_taken(tmp_path: Path) -> None:
    device = interpreted(saved(reference_model("qwen3"), tmp_path))
    with pytest.raises(AssertionError, match="did not sample"):
        launch(device, [Slice([-1], 0, [0], GREEDY)])
