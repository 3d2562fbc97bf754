"""Tiles of pictures where steps run on a GPU: the GPU's path by Triton's interpreter, of one rank and of two, and a GPU
itself. Texts are those of the reference library."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch
from transformers import Llama4ForConditionalGeneration

from engine.execution import gpu_model
from engine.execution.gpu_memory import GpuMemory
from engine.execution.gpu_model import GpuModel
from engine.execution.open import loaded_decoder, open_model, read_decoder, seeing_source
from engine.images.gpu_images import GpuImageEncoder
from engine.layers.linear_gpu import GpuLinear
from engine.memory.streams import DeviceStream
from engine.models.bert import TorchLinear
from engine.models.config import read_decoder_config
from engine.step.executor import EncoderAsleep, LoadedModel
from engine.vision import patch_layers
from engine.vision.families import read_vision_config
from engine.weights import assembly
from engine.weights.source import WeightSource
from tests.engine.ranks.test_gpu_ranks import two
from tests.engine.replica.test_images import Part, Seeing, text
from tests.engine.replica.test_tiles import picture, wanted
from tests.support.seeing_models import SIDE, TOKENS, random_image, saved_seeing, seeing_model
from tests.support.small_models import BLOCK_TOKENS, spec
from tests.support.tiling_models import tiling_model

pytestmark = pytest.mark.usefixtures("inference")
CPU = torch.device("cpu")
SIZES: dict[str, Any] = {"context_tokens": 256, "sequences": 4, "step_tokens": 64, "block_tokens": BLOCK_TOKENS}
PROMPT: list[Part] = [text(1, 5), random_image(1), text(2, 1), random_image(2), text(3, 4)]
SHORT: list[Part] = [text(7, 3), random_image(1), text(8, 4)]


@pytest.fixture(scope="module")
def reference() -> Llama4ForConditionalGeneration:
    return tiling_model()


@pytest.fixture(scope="module")
def folder(reference: Llama4ForConditionalGeneration, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiling")
    reference.save_pretrained(folder)
    return folder


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    fits = patch.object(gpu_model, "_require_weights_fit", lambda device, needed: None)
    with fits, patch.object(assembly, "_linear_of", GpuLinear), patch.object(patch_layers, "CpuLinear", TorchLinear):
        yield


def interpreted(folder: Path) -> LoadedModel:
    """The model as one GPU has it, whose kernels run in the interpreter."""
    model, resources = spec(folder, **SIZES), ExitStack()
    with as_on_a_gpu():
        config, tokens, files, source = read_decoder(model, CPU)
        source = seeing_source(model, source)
        opened = GpuModel(model, source.config, source, tokens, lambda: None, None, resources)
    runner = opened.decoder_runner(0)
    resources.callback(runner.close)
    for group in opened.memory.groups:
        group.map(range(len(group.mapped), group.layout.extents))
    return loaded_decoder(model, config, tokens, files, (runner, opened.memory, Mock()), resources)


@pytest.fixture
def seeing(folder: Path) -> Iterator[Seeing]:
    served = Seeing(folder, interpreted(folder), **SIZES)
    yield served
    served.close()


def memory_of(served: Seeing) -> GpuMemory:
    memory = served.model.sleeper
    assert isinstance(memory, GpuMemory)
    return memory


def test_texts_are_those_of_the_reference_library(seeing: Seeing, reference: Llama4ForConditionalGeneration) -> None:
    texts = seeing.texts([PROMPT], 2)
    assert texts == [wanted(reference, PROMPT, texts[0])]
    assert not memory_of(seeing).buffers.embeddings_EH.any(), "what was placed is zeroed behind its step"
    others: list[list[Part]] = [[PROMPT[0], random_image(seed), *PROMPT[2:]] for seed in range(3, 9)]
    assert any(texts[0] != wanted(reference, other, texts[0]) for other in others), "it is the picture that tells"


def test_it_sees_again_when_it_slept(seeing: Seeing, reference: Llama4ForConditionalGeneration) -> None:
    memory, mapped = memory_of(seeing), [each.mapped for each in seeing.model.memories]
    fall_asleep, nothing = memory.sleep, [list[int]() for _ in mapped]
    fall_asleep(nothing)
    with pytest.raises(EncoderAsleep):
        seeing.encoder.encode([random_image(1).tobytes()])
    memory.wake(mapped, nothing)
    assert seeing.texts([SHORT], 2) == [wanted(reference, SHORT, seeing.written[0])]


def test_two_ranks_see_what_rank_0_encodes(
    folder: Path, reference: Llama4ForConditionalGeneration, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patch_layers, "CpuLinear", TorchLinear)
    few_rows = SIZES | {"step_tokens": 16}  # a tile's rows are more, on each rank
    with two(folder, **few_rows) as ranks:
        served = Seeing(folder, ranks.model, **few_rows)
        assert served.texts([SHORT], 2) == [wanted(reference, SHORT, served.written[0])]
        served.worker.close()


def test_the_encoder_s_bytes_count_and_what_it_takes_meanwhile_is_left_free(folder: Path) -> None:
    model = interpreted(folder)
    source = WeightSource.open(folder, read_decoder_config(folder), torch.float32, CPU, False)
    text_alone, memory = source.bytes, model.sleeper
    assert isinstance(memory, GpuMemory)
    assert isinstance(memory.images, GpuImageEncoder)
    assert memory.usage().weights_bytes >= text_alone + source.with_vision(folder).vision_bytes
    assert memory.unmapped_bytes == memory.handover_bytes + memory.images.encoding_bytes > 0
    model.close()


class Encoder:
    """A VisionEncoder that says an image's first number."""

    bytes = 0

    def embeddings(self, pixels_BYX3: torch.Tensor) -> torch.Tensor:
        return pixels_BYX3[:, 0, :1, :1].float().expand(-1, TOKENS, 8)


def test_rows_lie_where_they_are_placed_until_their_step_is_queued(folder: Path) -> None:
    vision = read_vision_config(folder)
    assert vision is not None
    rows_EH = torch.zeros(3 * TOKENS, 8)
    encoder = GpuImageEncoder(vision, Encoder(), rows_EH, DeviceStream(CPU))
    images = [np.full((SIDE, SIDE, 3), number, np.uint8).tobytes() for number in (5, 9)]
    for row, rows_NH in zip((TOKENS, 2 * TOKENS), encoder.encode(images), strict=True):
        encoder.place(rows_NH, row)
    assert rows_EH[::TOKENS, 0].tolist() == [0, 5, 9]
    encoder.clear()
    assert not rows_EH.any()


def open_on_a_gpu(folder: Path) -> LoadedModel:
    return open_model(spec(folder, **SIZES), "cuda", None, lambda: None)


@pytest.mark.gpu
def test_a_gpu_s_texts_are_those_of_the_reference_library(
    folder: Path, reference: Llama4ForConditionalGeneration
) -> None:
    served = Seeing(folder, open_on_a_gpu(folder), **SIZES)
    prompts: list[list[Part]] = [PROMPT, SHORT, [text(1, 5), *picture(1), text(2, 9)]]
    texts = served.texts(prompts, 8)
    assert texts == [wanted(reference, prompt, own) for prompt, own in zip(prompts, texts, strict=True)]
    memory, mapped = served.model.sleeper, [each.mapped for each in served.model.memories]
    nothing: list[list[int]] = [[] for _ in mapped]
    fall_asleep, wake = memory.sleep, memory.wake
    fall_asleep(nothing)
    wake(mapped, nothing)
    other: list[Part] = [text(9, 4), random_image(5), text(8, 4)]
    again = served.submit(other, 8)
    served.run()
    assert served.written[again] == wanted(reference, other, served.written[again])
    served.close()


@pytest.mark.gpu
def test_a_gpu_takes_no_images_whose_rows_see_ahead(tmp_path: Path) -> None:
    model = open_on_a_gpu(saved_seeing(seeing_model(), tmp_path))
    assert model.images is None
    model.close()


@pytest.mark.parametrize(("make", "stages", "sees"), [(tiling_model, 1, True), (tiling_model, 2, False),
                                                      (seeing_model, 1, False)])  # fmt: skip
def test_which_models_see_on_a_gpu(make: Callable[[], Any], stages: int, sees: bool, tmp_path: Path) -> None:
    make().save_pretrained(tmp_path)
    config = read_decoder_config(tmp_path)
    source = WeightSource.open(tmp_path, config, torch.float32, torch.device("cuda"), False)
    assert bool(seeing_source(spec(tmp_path, stages=stages), source).vision_table) is sees
