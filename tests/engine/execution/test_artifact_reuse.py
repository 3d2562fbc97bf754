"""A GPU's replica that starts again: what it takes over of what an earlier one has measured."""

import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from triton.runtime.jit import JITFunction

from engine import kernels
from engine.execution import gpu_trial
from engine.execution.open import model_artifacts
from engine.kernels.compile_cache import name_kernels
from engine.protocol.specs import ModelSpec
from engine.protocol.types import SamplingParams
from engine.step.executor import LoadedModel
from engine.step.layout import pack_step
from tests.support.small_models import BLOCK_TOKENS, Text, reference_model, saved, shuffled_tables, spec

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("inference")]
SIZES = {"sequences": 64, "context_tokens": 1024, "dtype": "bfloat16", "kv_bytes": 64 << 20}


@pytest.fixture
def opened(open_on_gpu: Callable[[ModelSpec], Any]) -> Callable[[Path], LoadedModel]:
    return lambda folder: open_on_gpu(spec(folder, **SIZES))


def answers(runner: LoadedModel) -> list[list[int]]:
    """Greedy tokens of prompts and of steps that decode, of one sequence and of many."""
    found = []
    for count in (1, 3, 40):
        rng = np.random.default_rng(count)
        texts = [
            Text(rng.integers(0, 160, 104).tolist(), table)
            for table in shuffled_tables(runner, [110] * count, seed=count)
        ]
        for tokens in (100, 1, 1):
            slices = [text.slice(tokens, SamplingParams()) for text in texts]
            found.append(runner.executor.launch(pack_step(slices, BLOCK_TOKENS)).wait().tokens_R.tolist())
    return found


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No kernel is compiled yet, though other tests of the process may have loaded it."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    name_kernels()
    for module in [module for name, module in sys.modules.items() if name.startswith(f"{kernels.__name__}.")]:
        for kernel in vars(module).values():
            if isinstance(kernel, JITFunction):
                monkeypatch.setattr(kernel, "device_caches", defaultdict(kernel.create_binder))
    return saved(reference_model("llama 3.1"), tmp_path / "model")


def test_a_later_start_measures_nothing_and_answers_the_same(
    folder: Path, opened: Callable[[Path], LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = opened(folder)
    assert any((folder / ".hearth" / "kernels").iterdir())
    said, workspace_bytes = answers(first), first.report.workspace_bytes
    monkeypatch.setattr(gpu_trial.TrialSteps, "compile", lambda *_: pytest.fail("it tries all sizes"))
    monkeypatch.setattr(gpu_trial, "profile_costs", lambda *_: pytest.fail("it measures"))
    second = opened(folder)
    assert second.executor.costs == first.executor.costs
    assert second.report.kv_blocks == first.report.kv_blocks
    assert second.report.workspace_bytes == pytest.approx(workspace_bytes, rel=0.1)
    assert answers(second) == said
    while second.executor.warm_up():
        pass
    assert answers(second) == said
    assert second.report.workspace_bytes == pytest.approx(workspace_bytes, rel=0.1)


def test_a_start_without_what_was_measured_measures_again(folder: Path, opened: Callable[[Path], LoadedModel]) -> None:
    opened(folder)
    kept = model_artifacts(spec(folder, **SIZES), "cuda")
    assert kept is not None
    for file in kept.files:
        file.write_text("{")
    opened(folder)
    assert kept.read() is not None
