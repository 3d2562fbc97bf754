"""A skip for processors whose bfloat16 matmuls give a row other bits in other company, which the engine refuses to use.

Those with AVX2 alone have none without a C compiler; with AMX rows keep their bits in pieces of one size. float32 must
do everywhere, so that its refusal stays a failure.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from engine.layers.linear_cpu import NotBatchInvariant


@contextmanager
def skip_if_bfloat16_varies() -> Iterator[None]:
    """Skips the test with the engine's own reason where the engine refuses bfloat16. Decorates tests as well."""
    try:
        yield
    except NotBatchInvariant as refusal:
        if "torch.bfloat16" not in str(refusal):
            raise
        pytest.skip(str(refusal))
