"""engine/protocol/rank_layout.py: how many ranks and stages a model has where its spec leaves that open."""

import msgspec
import pytest

from engine.protocol.rank_layout import PeerLink, RankLayout, layout_on, step_s
from engine.protocol.specs import GPU_OVERHEAD_BYTES, ModelSpec

GIB = 1 << 30
LARGE = ModelSpec(
    name="m", folder="/m", gpus=0, weights_bytes=64 * GIB, context_kv_bytes=8 * GIB, most_ranks=8, layers=64,
    hidden=5120,
)  # fmt: skip
"""80 GiB in one part, 40 in two, 20 in four, beside GPU_OVERHEAD_BYTES."""
NVLINK, PCI_EXPRESS = PeerLink(450_000_000_000, True), PeerLink(32_000_000_000, False)


def changed(**fields: int) -> ModelSpec:
    return msgspec.structs.replace(LARGE, **fields)


@pytest.mark.parametrize(
    ("rooms", "ranks"),
    [
        ([84], 1), ([83], 1), ([83] * 2, 2), ([44] * 2, 2), ([43] * 4, 4), ([43] * 3, 2), ([90, 30], 1),
        ([60, 44, 10], 2), ([5] * 8, 8), ([], 1),
    ],
)  # fmt: skip
def test_as_few_ranks_as_hold_weights_and_one_context(rooms: list[int], ranks: int) -> None:
    assert GPU_OVERHEAD_BYTES == 4 * GIB
    layout = layout_on(LARGE, [room * GIB for room in rooms])
    assert (layout.gpus, layout.stages) == (ranks, 1)


@pytest.mark.parametrize("fields", [{"gpus": 4, "stages": 0}, {"gpus": 0, "stages": 4}, {"gpus": 0, "stages": 3}])
def test_more_than_the_host_has_is_a_layout_that_is_refused_later(fields: dict[str, int]) -> None:
    assert layout_on(changed(**fields), [80 * GIB] * 2).devices >= 3


def test_numbers_that_are_asked_for_are_kept_and_one_that_does_not_divide_is_not_chosen() -> None:
    assert layout_on(changed(gpus=3), [90 * GIB]) == RankLayout(3, 1)
    assert layout_on(changed(gpus=2, stages=4), [90 * GIB]) == RankLayout(2, 4)
    assert layout_on(changed(most_ranks=5), [44 * GIB] * 6).gpus == 5
    assert layout_on(changed(stages=2), [44 * GIB] * 8).devices == 2
    assert layout_on(changed(gpus=2, stages=0), [24 * GIB] * 4)[:2] == (2, 2)


def test_weak_links_get_stages_and_strong_ones_ranks_and_both_are_told_why() -> None:
    open_ = changed(stages=0)
    near, far = (layout_on(open_, [44 * GIB] * 2, link) for link in (NVLINK, PCI_EXPRESS))
    assert (near[:2], far[:2]) == ((2, 1), (1, 2))
    assert near.reason.startswith("over NVLink of 450 GB/s a busy step takes about ")
    assert near.reason.endswith(" ms in 2 stages of a rank each")
    assert far.reason.startswith("over PCI Express of 32 GB/s a busy step takes about ")
    assert far.reason.endswith(" ms in 2 ranks that share every layer")


def test_a_model_that_does_not_divide_among_its_gpus_gets_stages_too() -> None:
    layout = layout_on(changed(stages=0, most_ranks=2), [24 * GIB] * 4, NVLINK)
    assert (layout.gpus, layout.stages, layout.text) == (2, 2, "2 stages of 2 ranks that share every layer each")
    layout = layout_on(changed(stages=0, most_ranks=1), [44 * GIB] * 2, NVLINK)
    assert layout == RankLayout(1, 2, "it takes 2 GPUs, and divides among them in no other way")


def test_one_gpu_that_holds_it_is_enough() -> None:
    assert layout_on(changed(stages=0), [90 * GIB] * 4, PCI_EXPRESS) == RankLayout(
        1, 1, "it holds the weights and a context"
    )


def test_a_slower_link_never_makes_a_step_faster_and_costs_ranks_more_than_stages() -> None:
    open_ = changed(stages=0)
    for layout in (RankLayout(2, 1), RankLayout(1, 2), RankLayout(2, 2)):
        assert step_s(open_, layout, PCI_EXPRESS) > step_s(open_, layout, NVLINK)
    lost = {
        layout: step_s(open_, layout, PCI_EXPRESS) - step_s(open_, layout, NVLINK)
        for layout in (RankLayout(2, 1), RankLayout(1, 2))
    }
    assert lost[RankLayout(2, 1)] > 10 * lost[RankLayout(1, 2)]
