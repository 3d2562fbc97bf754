"""One row in few calls has the bits that the same row has through the layers one by one, and among others."""

from pathlib import Path

import pytest
import torch

from benchmarks.engine.cpu_engine import Geometry, weights, write_folder
from engine.execution.cpu_memory import CpuMemory
from engine.execution.cpu_runner import CpuRunner
from engine.execution.open import open_model
from engine.protocol.specs import ModelSpec
from engine.protocol.types import SamplingParams
from engine.step.executor import LoadedModel
from engine.step.layout import SequenceSlice, pack_step, unpack_step
from tests.support.batch_invariance import skip_if_bfloat16_varies
from tests.support.processors import PROCESSORS, compute_as

BLOCK_TOKENS = 16
SIZES = Geometry(256, 512, 3, 256, 4, 2, 64, ())


@pytest.fixture(autouse=True, params=PROCESSORS)
def processor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    compute_as(request.param, monkeypatch)


@skip_if_bfloat16_varies()
def opened(folder: Path, **settings: object) -> LoadedModel:
    write_folder(folder, SIZES, weights(SIZES))
    spec = ModelSpec(name="m", folder=str(folder), kv_bytes=1 << 24, dtype="bfloat16", **settings)  # type: ignore[arg-type]
    return open_model(spec, "cpu", 1, lambda: None)


def decoded(model: LoadedModel, prompts: list[list[int]], steps: int) -> list[torch.Tensor]:
    """The first sequence's logits of each step, all sequences decoded together from their prompts on."""
    runner = model.executor
    assert isinstance(runner, CpuRunner)
    tables = [list(range(8 * i, 8 * i + 8)) for i in range(len(prompts))]
    rows = [list(prompt) for prompt in prompts]

    def logits(slices: list[SequenceSlice]) -> torch.Tensor:
        found = runner.logits(unpack_step(pack_step(slices, BLOCK_TOKENS)))
        assert found is not None
        return found

    last = [
        int(logits([SequenceSlice(row, 0, [table], SamplingParams())])[0].argmax())
        for row, table in zip(rows, tables, strict=True)
    ]
    seen = []
    for step in range(steps):
        together = [
            SequenceSlice([token], len(row) + step, [table], SamplingParams())
            for token, row, table in zip(last, rows, tables, strict=True)
        ]
        found = logits(together)
        last = found.argmax(-1).tolist()
        seen.append(found[:1].clone())
    return seen


@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_alone_has_the_bits_that_it_has_layer_by_layer_and_in_company(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    prompts = torch.randint(0, SIZES.vocabulary, (3, 50), generator=torch.Generator().manual_seed(3)).tolist()
    with torch.inference_mode():
        model = opened(tmp_path)
        torch.set_num_threads(threads)
        alone = decoded(model, prompts[:1], 30)
        company = decoded(model, prompts, 30)
        monkeypatch.setattr(CpuMemory, "row_decoder", lambda *_: None)
        generic = decoded(model, prompts[:1], 30)
        torch.set_num_threads(1)
    assert all(map(torch.equal, alone, generic))
    assert all(map(torch.equal, alone, company))


def test_a_row_is_computed_anew_with_the_weights_of_each_wake(tmp_path: Path) -> None:
    prompts = [list(range(40))]
    with torch.inference_mode():
        model = opened(tmp_path)
        before = decoded(model, prompts, 4)
        memory = model.sleeper
        assert isinstance(memory, CpuMemory)
        assert memory._row_decoder is not None
        rest = memory.sleep
        rest([[] for _ in memory.memories])
        assert memory._row_decoder is None, "a decoder that sleeps keeps no weights"
        memory.wake([group.mapped for group in memory.groups], [[] for _ in memory.memories])
        assert all(map(torch.equal, before, decoded(model, prompts, 4)))
