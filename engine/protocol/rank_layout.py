"""How a model is shared out to several GPUs of a host: to ranks that share every layer, to stages that share out the
layers, or both. It knows GPUs by their bytes and by the links between them alone.

The choice is by what a step of a busy replica would take, with answers and pieces of prompts. Ranks add up a sum over
all of them twice in each layer, and wait for it; stages hand a sum on once, but each reads its weights for every
micro-batch, and waits at a prompt's ends. So ranks win where links are fast, stages where they are not.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

from engine.protocol.specs import ModelSpec, estimated_rank_bytes

_ANSWERS: Final = 64  # rows of a step
_PROMPT_ROWS: Final = 512
_ROW_BYTES: Final = 2  # of each number that ranks exchange; between stages twice as many
_MEMORY_BYTES_PER_S: Final = 3e12  # of a GPU: only its proportion to a link's counts
_NUMBERS_PER_S: Final = 3e14  # of weights, each with one row
_EXCHANGE_S: Final = 8e-6  # over NVLink, whatever its size; behind PCI Express writes wait longer
_SLOW_EXCHANGE_S: Final = 25e-6
_EXCHANGES: Final = 2  # of a layer
_MICRO_BATCHES: Final = 2  # times as many as stages, of a step with prompts


class PeerLink(NamedTuple):
    """The weakest link between two of a host's GPUs: what it carries each way, 0 where nobody knows, and whether it is
    NVLink."""

    bytes_per_s: int
    nvlink: bool

    @property
    def text(self) -> str:
        rate = f" of {self.bytes_per_s / 1e9:.0f} GB/s" if self.bytes_per_s else ""
        return f"{'NVLink' if self.nvlink else 'PCI Express'}{rate}"


UNKNOWN_LINK: Final = PeerLink(0, True)


class RankLayout(NamedTuple):
    """So many stages of so many ranks, and why; empty where the spec says how many."""

    gpus: int
    stages: int
    reason: str = ""

    @property
    def devices(self) -> int:
        return self.gpus * self.stages

    @property
    def text(self) -> str:
        """What it is, in words."""
        ranks = f"{self.gpus} ranks that share every layer"
        if self.stages == 1:
            return ranks if self.gpus > 1 else "one GPU"
        return f"{self.stages} stages of {'a rank' if self.gpus == 1 else ranks} each"


def layout_on(model: ModelSpec, gpu_bytes: Sequence[int], link: PeerLink = UNKNOWN_LINK) -> RankLayout:
    """How a model is shared out to GPUs of which models may have so many bytes each: as its spec says; what that leaves
    open as on the fewest GPUs that hold its weights and the KV of one context, or the most that there can be where no
    number does, and then by `link`."""
    if model.gpus and model.stages:
        return RankLayout(model.gpus, model.stages)
    rooms = sorted(gpu_bytes, reverse=True)
    layouts = _layouts(model, max(1, len(rooms)))
    counts = sorted({layout.devices for layout in layouts})
    fitting = [
        count
        for count in counts
        if count <= len(rooms)
        and estimated_rank_bytes(model, count) + model.context_kv_bytes // count <= rooms[count - 1]
    ]
    count = fitting[0] if fitting else counts[-1]
    took = {layout: step_s(model, layout, link) for layout in layouts if layout.devices == count}
    best = min(took, key=lambda layout: (took[layout], layout.stages))
    return best._replace(reason=_reason(took, best, link))


def step_s(model: ModelSpec, layout: RankLayout, link: PeerLink) -> float:
    """Seconds of a busy step on GPUs of some speed: to be compared with those of other layouts alone."""
    gpus, stages, rows = layout.gpus, layout.stages, _ANSWERS + _PROMPT_ROWS
    rate = link.bytes_per_s or (4e11 if link.nvlink else 5e10)
    reads_s = model.weights_bytes / gpus / _MEMORY_BYTES_PER_S  # by every stage, for each of as many micro-batches
    computes_s = model.weights_bytes / 2 / layout.devices * rows / _NUMBERS_PER_S
    if stages > 1:
        computes_s *= 1 + (stages - 1) / (_MICRO_BATCHES * stages)
    exchange_s = _EXCHANGE_S if link.nvlink else _SLOW_EXCHANGE_S
    row_bytes, shared = model.hidden * _ROW_BYTES, (gpus - 1) / gpus
    ranks_s = model.layers * _EXCHANGES * (exchange_s + 2 * shared * rows * row_bytes / rate) if gpus > 1 else 0.0
    hands_s = stages * _MICRO_BATCHES * stages * exchange_s + 2 * rows * row_bytes / rate if stages > 1 else 0.0
    return reads_s + computes_s + ranks_s + hands_s


def _layouts(model: ModelSpec, most: int) -> list[RankLayout]:
    """All that are possible on so many GPUs, at least one."""
    ranks = [model.gpus] if model.gpus else [n for n in range(1, most + 1) if model.most_ranks % n == 0] or [1]
    stages = [model.stages] if model.stages else range(1, min(most, max(1, model.layers)) + 1)
    layouts = [RankLayout(gpus, count) for gpus in ranks for count in stages]
    return [layout for layout in layouts if layout.devices <= most] or [min(layouts, key=lambda each: each.devices)]


def _reason(took: dict[RankLayout, float], best: RankLayout, link: PeerLink) -> str:
    others = [(seconds, layout) for layout, seconds in took.items() if layout != best]
    if best.devices == 1:
        return "it holds the weights and a context"
    if not others:
        return f"it takes {best.devices} GPUs, and divides among them in no other way"
    seconds, other = min(others)
    return (
        f"over {link.text} a busy step takes about {1e3 * took[best]:.1f} ms so, and {1e3 * seconds:.1f} ms in "
        f"{other.text}"
    )
