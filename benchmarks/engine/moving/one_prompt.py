"""How long a prompt's blocks take to the replica that goes on with it, from the landing of the prompt's last step."""

import json
import random
import statistics
from collections import defaultdict
from pathlib import Path

from benchmarks.engine.moving.pairs import two_replicas, wait_until_idle
from benchmarks.record import record
from engine.handover.messages import handover_id
from engine.protocol.types import SamplingParams, Scope
from tests.support.moving_replicas import Journey, MovingReplica, order_of

ROUNDS = 9
WARM_UPS = 3
NVLINK_BYTES_S = 389e9  # of one direction, measured by a copy


def marks_of(replica: MovingReplica) -> dict[str, dict[str, float]]:
    """When what happened, by handover."""
    marks: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for line in (replica.folder / "marks").read_text().splitlines():
        id, mark, at_s = json.loads(line)
        marks[id][mark] = at_s
    return marks


def one_prompt(device: str, kept: Path | None) -> None:
    tokens = 8192 if device == "cuda" else 1024
    rng, ids = random.Random(8), []
    with two_replicas(device, kept) as (source, target):
        for _ in range(WARM_UPS + ROUNDS):
            prompt = [rng.randrange(5, 900) for _ in range(tokens)]
            journey = Journey(order_of(prompt, 64, Scope(), SamplingParams(ignore_eos=True)), source)
            journey.begin()
            journey.ask(target)
            journey.settle()
            assert journey.moved(), source.peer.failed
            journey.follow(target)
            journey.finish()
            ids.append(handover_id(journey.key).hex())
            wait_until_idle(source, target)
        sent = source.peer.counted("handover_sent_blocks")
        in_windows = source.peer.counted("handover_window_blocks")
        corrupt = target.peer.counted("handover_corrupt_blocks")
        assert source.peer.load.prefill is not None
        block_bytes = source.peer.load.prefill.token_bytes * 16
        marks = marks_of(source), marks_of(target)
    assert (in_windows, corrupt) == (sent, 0), f"{in_windows} of {sent} blocks went by a window, {corrupt} were corrupt"
    report(device, tokens, block_bytes, [marks[0][id] | marks[1][id] for id in ids[WARM_UPS:]])


def report(device: str, tokens: int, block_bytes: int, rounds: list[dict[str, float]]) -> None:
    whole, pulled, through = (
        statistics.median(1e3 * (each[end] - each[begin]) for each in rounds)
        for begin, end in (("landed", "whole"), ("claimed", "readable"), ("landed", "readable"))
    )
    total = tokens // 16 * block_bytes
    shape = (
        f"{tokens} tokens, {total / 1e9:.2f} GB, "
        f"{'llama-3.1-8b bf16 between two GPUs' if device == 'cuda' else 'built-in model, two CPU replicas'}, "
        f"median of {len(rounds)}"
    )
    bound = 1e3 * total / NVLINK_BYTES_S
    small = "" if device == "cuda" else ", small"
    record(
        "handovers", f"kv-handover-8k{small}, from the last step's landing until all is whole and in the pool, {shape}",
        whole + pulled, "ms", bound=bound if device == "cuda" else None,
    )  # fmt: skip
    record("handovers", f"handover{small}, of it until all is whole at the receiver, {shape}", whole, "ms")
    record("handovers", f"handover{small}, of it from the claim until it can be read, {shape}", pulled, "ms")
    record("handovers", f"handover{small}, with the way by a gateway between these, {shape}", through, "ms")
    record(
        "handovers", f"handover{small} until it is whole, {shape}", total / whole / 1e6, "GB/s",
        bound=NVLINK_BYTES_S / 1e9 if device == "cuda" else None,
    )  # fmt: skip
