"""Decoders that give vectors: through the scheduler that serves text, against the reference library."""

import random
from array import array
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel

from engine.execution.open import open_model
from engine.models.config import ModelConfigError
from engine.protocol.frames import Submit
from engine.protocol.specs import ModelSpec
from engine.protocol.types import FinishReason, Pooling, RejectReason, SamplingParams, Scope, ScopeKind
from engine.replica.open_scheduler import max_sequence_tokens, open_scheduler, open_validator
from engine.scheduling.step_loop import StepLoop
from engine.sequences.validation import SubmitRejected
from engine.step.layout import SequenceSlice, pack_step
from tests.engine.execution.test_gpu_runner import interpreted
from tests.support.small_models import BLOCK_TOKENS, FAMILIES, in_all_groups, open_small, reference_model, saved, spec

pytestmark = pytest.mark.usefixtures("inference")

TENANT = Scope(ScopeKind.TENANT, b"t" * 16)


class Served:
    """A runner with its scheduler and loop."""

    def __init__(self, model: ModelSpec, device: str = "cpu") -> None:
        opened = open_model(model, device, 1, lambda: None)
        self.model = opened
        self.scheduler = open_scheduler(opened, model, lambda: 0.0)
        self.loop = StepLoop(opened.executor, self.scheduler, opened.memories)
        self.door = open_validator(opened, model, max_sequence_tokens(opened, 0))
        self.cached: dict[int, int] = {}
        self._next = 0

    def vectors(self, texts: Sequence[Sequence[int]], scope: Scope = TENANT) -> list[NDArray[np.float32]]:
        """All submitted at once."""
        first = self._next
        for text in texts:
            packed = array("I", text).tobytes()
            submit = Submit(self._next, packed, scope, SamplingParams(), max_tokens=1, pooling=Pooling.LAST)
            self.scheduler.intake.add(self.door.sequences(submit, 1, 0.0))
            self._next += 1
        found, finished = {}, {}
        while self.loop.turn():
            self.scheduler.check()
            for progress in self.scheduler.intake.take_outputs().values():
                assert not progress.ids, "a vector's prompt writes nothing"
                self.cached |= {started.id: started.cached_tokens for started in progress.started}
                found |= {vector.id: np.frombuffer(vector.values, "<f4") for vector in progress.vectors}
                finished |= {finish.id: finish for finish in progress.finished}
        assert all(finish.reason is FinishReason.STOP for finish in finished.values())
        assert all(finish.completion_tokens == 0 for finish in finished.values())
        return [found[id] for id in range(first, self._next)]


def _texts(lengths: Sequence[int]) -> list[list[int]]:
    pick = random.Random(3)
    return [[pick.randrange(2, 160) for _ in range(length)] for length in lengths]


def _reference(model: PreTrainedModel, tokens: Sequence[int]) -> NDArray[np.float32]:
    found: NDArray[np.float32] = model.model(torch.tensor([tokens])).last_hidden_state[0, -1].numpy()
    return found


@pytest.mark.parametrize("family", ["qwen3", "mistral window", "qwen2"])
def test_last_tokens_vectors_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    model = reference_model(family)
    served = Served(spec(saved(model, tmp_path), vectors=True, step_tokens=64))
    texts = _texts([1, 2, 16, 17, 63, 64, 65, 300])
    for found, text in zip(served.vectors(texts), texts, strict=True):
        assert np.abs(found - _reference(model, text)).max() < 1e-4
        assert np.dot(found, _reference(model, text)) / np.square(found).sum() == pytest.approx(1, abs=1e-5)


def test_a_checkpoint_without_head_and_prefix_is_read(tmp_path: Path) -> None:
    whole = reference_model("qwen3")
    whole.model.save_pretrained(tmp_path)
    text = _texts([20])[0]
    (found,) = Served(spec(tmp_path, vectors=True)).vectors([text])
    assert np.abs(found - _reference(whole, text)).max() < 1e-4


def test_one_stored_without_its_head_under_the_whole_models_name_is_read(tmp_path: Path) -> None:
    """As Qwen3-Embedding's is."""
    whole = reference_model("qwen3")
    whole.model.save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"Qwen3Model"', '"Qwen3ForCausalLM"'))
    text = _texts([20])[0]
    (found,) = Served(spec(tmp_path, vectors=True)).vectors([text])
    assert np.abs(found - _reference(whole, text)).max() < 1e-4


def test_a_vector_does_not_depend_on_company_chunks_or_the_cache(tmp_path: Path) -> None:
    folder = saved(reference_model("qwen3"), tmp_path)
    texts = _texts([5, 40, 100, 33])
    alone = [Served(spec(folder, vectors=True)).vectors([text])[0] for text in texts]
    served = Served(spec(folder, vectors=True, step_tokens=16))
    for _ in range(2):
        for found, expected in zip(served.vectors(texts), alone, strict=True):
            assert np.array_equal(found, expected)
    assert [served.cached[id] for id in range(4, 8)] == [0, 32, 96, 32]


def test_another_scope_finds_nothing_in_the_cache(tmp_path: Path) -> None:
    served = Served(spec(saved(reference_model("qwen3"), tmp_path), vectors=True))
    texts = _texts([40])
    served.vectors(texts)
    served.vectors(texts, Scope(ScopeKind.TENANT, b"o" * 16))
    assert served.cached == {0: 0, 1: 0}


def test_a_text_may_fill_the_whole_context(tmp_path: Path) -> None:
    model = reference_model("qwen3")
    served = Served(spec(saved(model, tmp_path), vectors=True, context_tokens=128))
    (text,) = _texts([128])
    assert np.abs(served.vectors([text])[0] - _reference(model, text)).max() < 1e-4
    with pytest.raises(SubmitRejected) as refused:
        served.vectors(_texts([129]))
    assert refused.value.reason is RejectReason.TOO_LONG


def test_models_of_text_give_no_vectors_and_models_of_vectors_no_text(tmp_path: Path) -> None:
    folder = saved(reference_model("qwen3"), tmp_path)
    text, vector = Served(spec(folder)), Served(spec(folder, vectors=True))
    for served, pooling in ((text, Pooling.LAST), (vector, None), (vector, Pooling.MEAN)):
        submit = Submit(9, array("I", [3]).tobytes(), TENANT, SamplingParams(), max_tokens=1, pooling=pooling)
        with pytest.raises(SubmitRejected, match="pooling"):
            served.door.sequences(submit, 1, 0.0)


def test_n_and_max_tokens_mean_nothing_for_a_vector(tmp_path: Path) -> None:
    served = Served(spec(saved(reference_model("qwen3"), tmp_path), vectors=True))
    for n, max_tokens in ((2, 1), (1, 2)):
        submit = Submit(9, array("I", [3]).tobytes(), TENANT, SamplingParams(), max_tokens, n=n, pooling=Pooling.LAST)
        with pytest.raises(SubmitRejected, match="n and max_tokens"):
            served.door.sequences(submit, 1, 0.0)


def test_a_model_without_head_is_not_asked_for_text(tmp_path: Path) -> None:
    AutoModel.from_config(FAMILIES["qwen3"]()).save_pretrained(tmp_path)
    with pytest.raises(ModelConfigError, match="Text Embeddings"):
        open_model(spec(tmp_path), "cpu", 1, lambda: None)


def test_a_device_gives_the_vectors_that_a_host_does(tmp_path: Path) -> None:
    folder = saved(reference_model("qwen3 biases window"), tmp_path)
    host = open_small(folder, vectors=True)
    device = interpreted(folder, vectors=True)
    texts = _texts([3, 20])
    slices = [SequenceSlice(text, 0, [[4 * i, 4 * i + 1]], SamplingParams()) for i, text in enumerate(texts)]
    packed = pack_step(in_all_groups(host, slices), BLOCK_TOKENS)
    expected, found = host.executor.launch(packed).wait(), device.executor.launch(packed).wait()
    assert expected.vectors_RH is not None
    assert found.vectors_RH is not None
    assert found.tokens_R.tolist() == [0, 0]
    assert np.abs(found.vectors_RH - expected.vectors_RH).max() < 1e-4


def test_the_head_is_not_loaded(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(FAMILIES["llama 2"]())
    folder = saved(model, tmp_path)
    bytes_of = {
        vectors: open_model(spec(folder, vectors=vectors), "cpu", 1, lambda: None).report.weights_bytes
        for vectors in (False, True)
    }
    assert bytes_of[False] - bytes_of[True] == model.lm_head.weight.nbytes


@pytest.mark.gpu
def test_a_gpus_vectors_are_those_of_a_cpu(tmp_path: Path) -> None:
    folder = saved(reference_model("qwen3"), tmp_path)
    texts = _texts([1, 17, 100, 300])
    expected = Served(spec(folder, vectors=True)).vectors(texts)
    served = Served(spec(folder, vectors=True), device="cuda")
    with closing(served.model):
        found = served.vectors(texts)
    for one, other in zip(found, expected, strict=True):
        assert np.abs(one - other).max() < 2e-3
