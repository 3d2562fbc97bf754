"""engine/layers/cpu_row.py: without a compiler, or with one that fails, models do without and a log says so."""

import logging
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from engine.layers import cpu_row


@pytest.fixture(autouse=True)
def anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A processor that has what is needed, and nothing compiled yet."""
    processors = tmp_path / "cpuinfo"
    processors.write_text("model name\t: any\nflags\t\t: fpu fma avx2\n\nflags\t\t: fpu\n")
    monkeypatch.setattr(cpu_row, "_PROCESSORS", processors)
    for cached in (cpu_row.start_compiling, cpu_row.row_functions):
        cached.cache_clear()
    yield processors
    for cached in (cpu_row.start_compiling, cpu_row.row_functions):
        cached.cache_clear()


def test_another_processor_is_not_compiled_for(anew: Path) -> None:
    anew.write_text("flags\t\t: fpu avx2\n")
    assert cpu_row.start_compiling() is None
    anew.unlink()
    cpu_row.start_compiling.cache_clear()
    assert cpu_row.row_functions() is None


def test_without_a_compiler_a_log_says_what_that_costs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with caplog.at_level(logging.INFO, "engine"):
        assert cpu_row.row_functions() is None
    assert "no C compiler" in caplog.text


@pytest.mark.parametrize("compiler", ["false", "/no/such/compiler -O1"])
def test_a_compiler_that_fails_leaves_models_to_the_library(compiler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", compiler)
    assert cpu_row.row_functions() is None


def test_a_compiler_that_a_busy_host_slows_down_is_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class SlowCompiler:
        def wait(self, timeout: float | None = None) -> int:
            if timeout is not None and timeout < 120:
                raise subprocess.TimeoutExpired("cc", timeout)
            waited.append(timeout)
            return 1

        def kill(self) -> None: ...

    waited: list[float | None] = []
    compilation = cpu_row._Compilation(SlowCompiler(), tmp_path)  # type: ignore[arg-type]
    monkeypatch.setattr(cpu_row, "start_compiling", cache(lambda: compilation))
    cpu_row.row_functions()
    assert None not in waited[:1], "a compiler that hangs may not keep a replica from serving for good"
    assert waited
