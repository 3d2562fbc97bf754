"""Models whose layers see unlike amounts, through the scheduler that serves text: greedy texts of the reference library
over several windows, with prefixes found and sleep between; on a CPU, and on a GPU's runner whose kernels are
interpreted."""

from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from engine.execution.open import open_model
from engine.models.config import read_decoder_config
from engine.protocol.frames import SetPlacement, Submit
from engine.protocol.types import Residency, SamplingParams, Scope, ScopeKind
from engine.replica.open_scheduler import max_sequence_tokens, open_scheduler, open_validator
from engine.replica.sleep_wake import SleepController
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.step_loop import StepLoop
from engine.step import attention_plan
from engine.step.cost_model import CostModel
from engine.step.executor import LoadedModel
from tests.engine.execution.test_gpu_runner import interpreted
from tests.support.small_models import BLOCK_TOKENS, FAMILIES, reference_model, saved, spec

pytestmark = pytest.mark.usefixtures("inference")

WINDOWED = ["mistral window", "qwen2 window", "ministral", "gemma2", "gemma3"]
TENANT = Scope(ScopeKind.TENANT, b"t" * 16, account=b"t" * 16)


class Served:
    """A model with its scheduler and loop."""

    def __init__(self, model: LoadedModel, folder: Path) -> None:
        self.model = model
        self.scheduler = open_scheduler(model, spec(folder), lambda: 0.0)
        assert isinstance(self.scheduler, Scheduler)
        self.kv = self.scheduler.kv
        self.loop = StepLoop(model.executor, self.scheduler, model.memories)
        self.door = open_validator(model, spec(folder), max_sequence_tokens(model, 0))
        self.cached: dict[int, int] = {}
        self._next = 0

    def texts(self, prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
        """What greedy decoding adds to each, all submitted at once."""
        written: dict[int, list[int]] = {}
        for prompt in prompts:
            submit = Submit(self._next, array("I", prompt).tobytes(), TENANT, SamplingParams(), max_tokens=tokens)
            self.scheduler.intake.add(self.door.sequences(submit, 1, 0.0))
            written[self._next] = []
            self._next += 1
        while self.loop.turn():
            self.scheduler.check()
            for outputs in self.scheduler.intake.take_outputs().values():
                self.cached |= {started.id: started.cached_tokens for started in outputs.started}
                tokens_of_all = iter(np.frombuffer(outputs.tokens, "<u4").tolist())
                for id, count in zip(outputs.ids, outputs.counts, strict=True):
                    written[id] += [next(tokens_of_all) for _ in range(count)]
        return list(written.values())


def greedy(reference: PreTrainedModel, prompt: Sequence[int], tokens: int) -> list[int]:
    """The reference library's, each token from the whole text, up to one that ends it."""
    ids = list(prompt)
    while len(ids) < len(prompt) + tokens and (len(ids) == len(prompt) or ids[-1] != 1):
        ids.append(int(reference(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("family", [*WINDOWED, "llama4 scout", "gpt-oss"])
def test_texts_are_those_of_the_reference_library_over_several_windows(family: str, tmp_path: Path) -> None:
    assert family in FAMILIES
    reference = reference_model(family)
    folder = saved(reference, tmp_path)
    rng = np.random.default_rng(5)
    common = rng.integers(2, 160, 16 * BLOCK_TOKENS).tolist()
    first = [common[:length] + rng.integers(2, 160, 5).tolist() for length in (3, 60, 130, 250)]
    served = Served(open_model(spec(folder), "cpu", 1, lambda: None), folder)
    assert served.texts(first, 24) == [greedy(reference, prompt, 24) for prompt in first]
    # What the longest one left serves prefixes that end before, at and behind the windows' edges.
    again = [common[:length] + rng.integers(2, 160, 3).tolist() for length in (16, 32, 48, 96, 160, 240)]
    assert served.texts(again, 8) == [greedy(reference, prompt, 8) for prompt in again]
    assert [served.cached[id] for id in range(4, 10)] == [16, 32, 48, 96, 160, 240]
    for group in served.kv.windowed:
        group.pool.free(group.cached.evict(1000))  # one group alone has lost all
    assert served.texts(again[3:4], 8) == [greedy(reference, again[3], 8)]
    begins_a_chunk = family == "llama4 scout"  # whose token 96 sees none before it
    assert served.cached[10] == (96 if begins_a_chunk else 0), "its window had to be computed again"
    served.model.close()


@pytest.mark.parametrize("family", ["mistral window", "gemma3"])
def test_what_is_kept_of_a_sleeping_model_serves_it_awake(family: str, tmp_path: Path) -> None:
    reference = reference_model(family)
    folder = saved(reference, tmp_path)
    served = Served(open_model(spec(folder), "cpu", 1, lambda: None), folder)
    prompt = np.random.default_rng(6).integers(2, 160, 150).tolist()
    wanted = greedy(reference, prompt, 12)
    assert served.texts([prompt], 12) == [wanted]
    block_bytes = sum(memory.layout.block_bytes for memory in served.model.memories)
    controller = SleepController(
        served.model.sleeper, served.model.memories, served.scheduler, served.loop, 9 * block_bytes, lambda: 0.0
    )
    for residency in (Residency.MEMORY, Residency.DEVICE):
        controller.order(SetPlacement(residency))
        while (status := controller.step(resting=True)) is None:
            pass
        assert (status.residency, status.problem) == (residency, "")
        assert (status.device_bytes == 0) == (residency == Residency.MEMORY)
    assert served.texts([prompt], 12) == [wanted]
    assert 0 < served.cached[1] <= 9 * BLOCK_TOKENS
    served.model.close()


@pytest.mark.parametrize("family", ["mistral window", "gemma3"])
def test_a_gpu_s_runner_writes_the_same(family: str, tmp_path: Path) -> None:
    reference = reference_model(family)
    folder = saved(reference, tmp_path)
    model = interpreted(folder)
    served = Served(model, folder)
    rng = np.random.default_rng(7)
    prompts = [rng.integers(2, 160, length).tolist() for length in (9, 70)]
    assert served.texts(prompts, 4) == [greedy(reference, prompt, 4) for prompt in prompts]
    model.close()


@pytest.mark.parametrize("family", ["mistral window", "gemma3 scaled"])
def test_prefixes_that_a_gpu_s_runner_reads_together_in_windows_change_no_text(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = reference_model(family)
    folder = saved(reference, tmp_path)
    windows = read_decoder_config(folder).windows
    model = interpreted(folder)
    model.executor.costs = CostModel(((1, 1.0),), 1.0, 0.1, 0.1, 0.1, 0.0, 0.0, windows)
    clipped, together = attention_plan._clipped, list[int]()

    def recorded(*arguments: Any) -> Any:
        segments, shared_S = clipped(*arguments)
        together.extend(last - first for _, first, last, _ in segments)
        return segments, shared_S

    monkeypatch.setattr(attention_plan, "_clipped", recorded)
    monkeypatch.setattr(attention_plan, "_ENTRY_KEYS", 0)  # else so few keys are not worth an entry
    served = Served(model, folder)
    rng = np.random.default_rng(9)
    common = rng.integers(2, 160, 32).tolist()
    prompts = [common + rng.integers(2, 160, length).tolist() for length in (1, 2, 6)]
    served.texts([[*common, 5]], 1)
    assert served.texts(prompts, 3) == [greedy(reference, prompt, 3) for prompt in prompts]
    assert together, "no segment was read in a window"
    assert {*together} <= {16, 32}, "of 37 keys, in units of 16"
    model.close()
