"""Models whose experts do not divide inside: each rank has whole ones. Ranks on a CPU, and those that run the GPU's
kernels in Triton's interpreter, beside one rank and the reference library."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import PreTrainedModel

from engine.models.parameter_entries import ParameterEntry
from engine.models.sharding import CannotShard
from engine.protocol.expert_cut import ExpertCut
from engine.protocol.types import SamplingParams
from engine.ranks.fork import RankGroup, fork_ranks
from engine.step.layout import SequenceSlice
from engine.weights import formats, source
from engine.weights.formats import Mxfp4Format, WeightFormats, plain_formats, select_formats
from engine.weights.tensor_index import StoredTensor
from tests.engine.execution.test_gpu_runner import interpreted
from tests.engine.ranks.test_gpu_ranks import life as gpu_life
from tests.engine.ranks.test_gpu_ranks import two
from tests.engine.ranks.test_ranks import life, opened, step
from tests.engine.weights.test_experts import write_packed
from tests.support.small_models import reference_model, saved, spec

pytestmark = pytest.mark.usefixtures("inference")

IDS = list(range(3, 43))
FAMILIES = ("qwen3moe", "llama4 scout", "gpt-oss")


def made(family: str, folder: Path) -> tuple[Path, PreTrainedModel]:
    """A model with an odd inner size of its experts, or one in 4 bits, whose half has half a pair of blocks."""
    if family == "gpt-oss":
        model = reference_model(family, hidden_size=128, intermediate_size=192, num_key_value_heads=4)
        return write_packed(folder, model), model
    if family == "llama4 scout":  # what all rows take is as wide, and is cut inside
        model = reference_model(family, num_key_value_heads=4, intermediate_size=128)
        return saved(model, folder), model
    model = reference_model(family, num_key_value_heads=4, moe_intermediate_size=33)
    model.set_experts_implementation("eager")  # others take no odd sizes
    return saved(model, folder), model


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, PreTrainedModel]]:
    return {family: made(family, tmp_path_factory.mktemp("model")) for family in FAMILIES}


@pytest.fixture
def whole_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of those that would divide inside on a CPU, which expands 4 bits."""
    monkeypatch.setattr(formats, "expert_cut", lambda *_: ExpertCut.EXPERTS)


def best(model: Any) -> tuple[int, dict[int, float]]:
    """The likeliest token behind a prompt, and what is said of the best."""
    sampling = SamplingParams(logprobs=5)
    tokens, logprobs = step(model, [SequenceSlice(IDS, 0, [list(range(4))], sampling)])
    return tokens[0], dict(zip(logprobs[0][1], logprobs[0][2], strict=True))


@pytest.mark.usefixtures("whole_experts")
@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_say_what_one_and_the_reference_library_say(
    family: str, models: dict[str, tuple[Path, PreTrainedModel]]
) -> None:
    folder, reference = models[family]
    with torch.no_grad():
        wanted_V = reference(torch.tensor([IDS])).logits[0, -1].log_softmax(-1)
    for gpus in (1, 2, 4):
        with opened(folder, gpus) as (model, _):
            token, logprobs = best(model)
        assert token == int(wanted_V.argmax())
        assert logprobs == pytest.approx({id_: float(wanted_V[id_]) for id_ in logprobs}, abs=1e-4)


@pytest.mark.usefixtures("whole_experts")
@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_give_the_bits_of_one_that_computes_all_parts(
    family: str, models: dict[str, tuple[Path, PreTrainedModel]]
) -> None:
    lives = []
    for gpus in (1, 2, 4):
        with opened(models[family][0], gpus, 4) as (model, _):
            lives.append(life(model))
    assert lives[0] == lives[1] == lives[2]


def test_experts_that_divide_neither_way_are_refused_before_anything_is_forked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RankGroup, "fork", lambda *_: pytest.fail("it forked"))
    folder = saved(reference_model("qwen3moe", moe_intermediate_size=33, num_experts=7), tmp_path)
    words = "experts' intermediate size 33 is no multiple of 2, nor is their number 7: the model cannot be cut into 2"
    with pytest.raises(CannotShard, match=words):
        fork_ranks(spec(folder, gpus=2), "cpu", 1)


def in_4_bits_as_on_a_gpu(
    table: Iterable[ParameterEntry], stored: Mapping[str, StoredTensor], dtype: torch.dtype, device: torch.device
) -> WeightFormats:
    table = list(table)
    on_gpu = select_formats(table, stored, torch.bfloat16, torch.device("cuda"))
    in_4_bits = {name: format_ for name, format_ in on_gpu.items() if isinstance(format_, Mxfp4Format)}
    return plain_formats(table, dtype) | in_4_bits


@pytest.mark.skipif(torch.cuda.is_available(), reason="processes of a CPU")
@pytest.mark.parametrize("family", ["qwen3moe", "gpt-oss"])
def test_two_gpus_answer_as_one(family: str, models: dict[str, tuple[Path, PreTrainedModel]]) -> None:
    folder, _ = models[family]
    one = interpreted(folder, context_tokens=256, sequences=8, step_tokens=128)
    expected = gpu_life(one.executor, one.memories, one.sleeper)
    one.close()
    with patch.object(source, "select_formats", in_4_bits_as_on_a_gpu), two(folder) as ranks:
        share = ranks.part.source
        assert isinstance(share, source.ShardSource)
        assert share.experts == range(4)
        kinds = {type(share.formats[f"layers.0.experts.{name}.weight"]) for name in ("gate_up", "down")}
        assert (kinds == {Mxfp4Format}) == (family == "gpt-oss")
        given = gpu_life(ranks.executor, ranks.memory.memories, ranks.memory)
    for own, other in zip(given, expected, strict=True):
        assert own.tokens_R.tolist() == other.tokens_R.tolist()
        for row, (logprob, ids, top) in other.logprobs.items():
            assert own.logprobs[row][0] == pytest.approx(logprob, abs=1e-4)
            assert own.logprobs[row][1] == ids
            assert own.logprobs[row][2] == pytest.approx(top, abs=1e-4)
