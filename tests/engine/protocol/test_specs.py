"""engine/protocol/specs.py: how many ranks a model has where its spec leaves that open."""

import msgspec
import pytest

from engine.protocol.specs import GPU_OVERHEAD_BYTES, ModelSpec, ranks_on

GIB = 1 << 30
LARGE = ModelSpec(
    name="m", folder="/m", gpus=0, weights_bytes=64 * GIB, context_kv_bytes=8 * GIB, most_ranks=8
)  # 80 GiB in one part, 40 in two, 20 in four, beside GPU_OVERHEAD_BYTES


@pytest.mark.parametrize(
    ("rooms", "ranks"),
    [
        ([84], 1), ([83], 1), ([83] * 2, 2), ([44] * 2, 2), ([43] * 4, 4), ([43] * 3, 2), ([90, 30], 1),
        ([60, 44, 10], 2), ([5] * 8, 8), ([], 1),
    ],
)  # fmt: skip
def test_as_few_ranks_as_hold_weights_and_one_context(rooms: list[int], ranks: int) -> None:
    assert GPU_OVERHEAD_BYTES == 4 * GIB
    assert ranks_on(LARGE, [room * GIB for room in rooms]) == ranks


def test_a_number_that_is_asked_for_is_kept_and_one_that_does_not_divide_is_not_chosen() -> None:
    assert ranks_on(msgspec.structs.replace(LARGE, gpus=3), [90 * GIB]) == 3
    assert ranks_on(msgspec.structs.replace(LARGE, most_ranks=5), [44 * GIB] * 6) == 5
