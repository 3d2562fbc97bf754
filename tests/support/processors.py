"""Functions of cpu_row.c as they are compiled for an older processor, whose instructions this one has too: a processor
with AVX-512 or AMX then also runs what one with AVX2 would."""

from functools import cache

import pytest

from engine.layers import cpu_row, row_ops
from engine.models import cpu_row_decoder

PROCESSORS = ("native", "haswell")  # as compilers name them; the second one has AVX2


@cache
def functions_for(processor: str) -> cpu_row.RowFunctions | None:
    caches = cpu_row.start_compiling, cpu_row.row_functions
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_row, "_FLAGS", [flag.replace("native", processor) for flag in cpu_row._FLAGS])
        for cached in caches:
            cached.cache_clear()
        try:
            return cpu_row.row_functions()
        finally:
            for cached in caches:
                cached.cache_clear()


def compute_as(processor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has this process compute as such a processor. Skips the test where nothing is compiled or it is the same."""
    own = cpu_row.row_functions()
    if own is None:
        pytest.skip("no compiler, or no such processor")
    if processor != "native":
        if own.multiply_row is None:
            pytest.skip("this processor has no more than AVX2 here already")
        other = functions_for(processor)
        for module in (cpu_row, row_ops, cpu_row_decoder):
            monkeypatch.setattr(module, "row_functions", lambda: other)
