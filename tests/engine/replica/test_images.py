"""Prompts with images through the scheduler that serves text: greedy texts of the reference library, however steps are
cut, with prefixes found, others beside, sleep between and images that cannot be encoded."""

import dataclasses
import hashlib
import select
import time
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from numpy.typing import NDArray
from safetensors.torch import load_file
from transformers import Gemma3ForConditionalGeneration

from engine.execution.open import inference_mode, open_model
from engine.images.image_worker import ImageWorker
from engine.protocol.frames import SequenceFinished, SetPlacement, Submit
from engine.protocol.types import (
    FinishReason,
    ImageInput,
    RejectReason,
    Residency,
    SamplingParams,
    SchedulingTerms,
    Scope,
    ScopeKind,
)
from engine.replica.open_scheduler import max_sequence_tokens, open_scheduler, open_validator
from engine.replica.sleep_wake import SleepController
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.step_loop import StepLoop
from engine.sequences import prompt_images
from engine.sequences.prompt_images import PLACEHOLDER, ImageElements
from engine.sequences.validation import SubmitRejected
from engine.step.executor import EncoderAsleep, LoadedModel
from engine.step.layout import EMBEDDING_TOKEN, unpack_step
from tests.support.seeing_models import (
    IMAGE_TOKEN,
    TOKENS,
    Image,
    greedy_seeing,
    random_image,
    reference_logits,
    saved_seeing,
    seeing_model,
)
from tests.support.small_models import spec

pytestmark = pytest.mark.usefixtures("inference")

Part = list[int] | Image


def scope(name: bytes = b"t") -> Scope:
    return Scope(ScopeKind.TENANT, name * 16, account=name * 16)


class Seeing:
    """A model that sees, opened on a CPU if it is not given, with its scheduler, loop and the thread that encodes."""

    def __init__(self, folder: Path, model: LoadedModel | None = None, **changes: Any) -> None:
        if model is None:
            model = open_model(spec(folder, **changes), "cpu", 1, lambda: None)
        assert model.images is not None
        self.model, self.encoder = model, model.images
        scheduler = open_scheduler(model, spec(folder, **changes), time.monotonic)
        assert isinstance(scheduler, Scheduler)
        self.scheduler = scheduler
        self.worker = ImageWorker(model.images, inference_mode)
        self.loop = StepLoop(model.executor, scheduler, model.memories, images=self.worker)
        self.door = open_validator(model, spec(folder, **changes), max_sequence_tokens(model, 0))
        self.cached: dict[int, int] = {}
        self.ended: dict[int, SequenceFinished] = {}
        self.written: dict[int, list[int]] = {}
        self.encoded = 0
        self._encode = model.images.encode
        model.images.encode = self._counted  # type: ignore[method-assign]

    def submit(self, parts: Sequence[Part], tokens: int, *, tenant: Scope | None = None, **changes: Any) -> int:
        """Submits one request; `changes` are fields of its Submit. Returns the id of its choice 0."""
        packed, first = array("I", _ids(parts, PLACEHOLDER)).tobytes(), len(self.written)
        submit = Submit(first, packed, tenant or scope(), SamplingParams(), tokens, images=_inputs(parts))
        sequences = self.door.sequences(replace(submit, **changes), 1, 0.0)
        self.scheduler.intake.add(sequences)
        self.written |= {sequence.id: [] for sequence in sequences}
        return first

    def _counted(self, images: Sequence[bytes]) -> list[NDArray[np.float32]]:
        self.encoded += len(images)
        return self._encode(images)

    def run(self) -> None:
        while not self.loop.idle:
            if not self.loop.turn():
                select.select([self.worker.bell], [], [])
                self.worker.bell.recv(4096)
            self.scheduler.check()
            self.take()

    def take(self) -> None:
        for outputs in self.scheduler.intake.take_outputs().values():
            self.cached |= {started.id: started.cached_tokens for started in outputs.started}
            self.ended |= {finished.id: finished for finished in outputs.finished}
            tokens = iter(np.frombuffer(outputs.tokens, "<u4").tolist())
            for id, count in zip(outputs.ids, outputs.counts, strict=True):
                self.written[id] += [next(tokens) for _ in range(count)]

    def texts(self, prompts: Sequence[Sequence[Part]], tokens: int, **changes: Any) -> list[list[int]]:
        """What greedy decoding adds to each, all submitted at once."""
        ids = [self.submit(parts, tokens, **changes) for parts in prompts]
        self.run()
        return [self.written[id] for id in ids]

    def close(self) -> None:
        self.worker.close()
        self.model.close()


def _ids(parts: Sequence[Part], placeholder: int) -> list[int]:
    return [id for part in parts for id in (part if isinstance(part, list) else [placeholder] * TOKENS)]


def _inputs(parts: Sequence[Part]) -> list[ImageInput]:
    inputs, first = [], 0
    for part in parts:
        if not isinstance(part, list):
            inputs.append(ImageInput(first, hashlib.sha256(part.tobytes()).digest(), part.tobytes()))
        first += len(part) if isinstance(part, list) else TOKENS
    return inputs


def wanted(model: Gemma3ForConditionalGeneration, parts: Sequence[Part], written: list[int]) -> list[int]:
    """The reference library's text, as far as `written` is that; never that of an empty one."""
    assert written
    images = [part for part in parts if not isinstance(part, list)]
    return greedy_seeing(model, _ids(parts, IMAGE_TOKEN), images, written)


def text(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(2, 140, length).tolist()


@pytest.fixture(scope="module")
def reference() -> Gemma3ForConditionalGeneration:
    return seeing_model()


@pytest.fixture(scope="module")
def folder(reference: Gemma3ForConditionalGeneration, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_seeing(reference, tmp_path_factory.mktemp("seeing"))


@pytest.fixture
def seeing(folder: Path) -> Iterator[Seeing]:
    served = Seeing(folder)
    yield served
    served.close()


def test_texts_are_those_of_the_reference_library(seeing: Seeing, reference: Gemma3ForConditionalGeneration) -> None:
    picture, other = random_image(1), random_image(2)
    prompts: list[list[Part]] = [
        [text(1, 5), picture, text(2, 9)],
        [text(3, 70), picture, text(4, 2), other, text(5, 1)],
        [text(6, 50)],
        [picture, text(7, 3)],
        [text(8, 11), other, text(9, 3), other, text(10, 20), picture, text(11, 4)],
    ]
    texts = seeing.texts(prompts, 5)
    assert texts == [wanted(reference, prompt, own) for prompt, own in zip(prompts, texts, strict=True)]
    swapped = [[part if isinstance(part, list) else random_image(3) for part in prompt] for prompt in prompts]
    others = [wanted(reference, prompt, own) for prompt, own in zip(swapped, texts, strict=True)]
    assert texts != others, "whatever the pictures"


def test_a_picture_is_whole_in_its_step_however_few_rows_steps_have(
    folder: Path, reference: Gemma3ForConditionalGeneration
) -> None:
    prompts: list[list[Part]] = [
        [text(1, 21), random_image(1), text(2, 5), random_image(2), text(3, 9)],
        [text(4, 3), random_image(3), text(5, 40)],
        [text(6, 50)],
    ]
    served = Seeing(folder, step_tokens=16)
    packed: list[tuple[list[int], int]] = []
    launch = served.model.executor.launch

    def launched(words: NDArray[np.int32]) -> Any:
        batch = unpack_step(words)
        images = (batch.tokens_T >= EMBEDDING_TOKEN).astype(int)
        packed.append((images.tolist(), len(images)))
        return launch(words)

    served.model.executor.launch = launched  # type: ignore[method-assign]
    texts = served.texts(prompts, 8)
    assert texts == [wanted(reference, prompt, own) for prompt, own in zip(prompts, texts, strict=True)]
    assert {sum(images) for images, _ in packed} == {0, TOKENS}, "an image was cut, or two exceeded the step"
    assert max(rows for _, rows in packed) <= 16 + TOKENS
    served.close()


def test_prefixes_are_found_before_within_and_behind_a_picture(
    seeing: Seeing, reference: Gemma3ForConditionalGeneration
) -> None:
    picture, other = random_image(1), random_image(2)
    seeing.texts([[text(1, 20), picture, text(2, 40)]], 2)
    again: list[tuple[list[Part], int]] = [
        ([text(1, 20), picture, text(2, 40), text(3, 5)], 96),  # behind it: the picture costs nothing
        ([text(1, 20), picture, text(4, 9)], 48),  # its first 28 tokens are cached
        ([text(1, 20), other, text(2, 40)], 16),
        ([text(1, 19), [77], other, text(2, 4)], 16),
        ([text(5, 20), picture, text(2, 40)], 0),
    ]
    encoded = seeing.encoded
    for prompt, cached in again:
        id = seeing.submit(prompt, 3)
        seeing.run()
        assert seeing.written[id] == wanted(reference, prompt, seeing.written[id])
        assert seeing.cached[id] == cached, prompt
    assert seeing.encoded == encoded + 4, "the picture of the first was encoded again"


def test_no_tenant_finds_another_s_picture(seeing: Seeing) -> None:
    prompt: list[Part] = [text(1, 20), random_image(1), text(2, 40)]
    seeing.texts([prompt], 2)
    first, second = (seeing.submit(prompt, 2, tenant=scope(name)) for name in (b"u", b"t"))
    seeing.run()
    assert (seeing.cached[first], seeing.cached[second]) == (0, 80)


def test_the_choices_of_a_request_share_its_pictures(seeing: Seeing, reference: Gemma3ForConditionalGeneration) -> None:
    prompt: list[Part] = [text(1, 5), random_image(1), text(2, 9)]
    first = seeing.submit(prompt, 6, n=3)
    seeing.run()
    assert [seeing.written[first + choice] for choice in range(3)] == [
        wanted(reference, prompt, seeing.written[first])
    ] * 3
    assert seeing.encoded == 1


def test_penalties_count_what_stands_for_a_picture_once(
    seeing: Seeing, reference: Gemma3ForConditionalGeneration
) -> None:
    """A prompt's elements are no ids: a penalty that took them for some would read past the vocabulary."""
    prompt: list[Part] = [text(1, 5), random_image(1), text(2, 9)]
    penalized = SamplingParams(repetition_penalty=1.5, frequency_penalty=0.5)
    id = seeing.submit(prompt, 6, sampling=penalized)
    seeing.run()
    assert seeing.ended[id].reason is FinishReason.LENGTH
    ids = _ids(prompt, IMAGE_TOKEN)
    logits_V = reference_logits(reference, ids, [random_image(1)])[-1]
    seen = torch.tensor(sorted({*ids}))
    logits_V[seen] = torch.where(logits_V[seen] > 0, logits_V[seen] / 1.5, logits_V[seen] * 1.5)
    assert seeing.written[id][0] == int(logits_V.argmax())


def test_a_sequence_that_lost_all_computes_its_pictures_again(
    seeing: Seeing, reference: Gemma3ForConditionalGeneration
) -> None:
    prompt: list[Part] = [text(1, 20), random_image(1), text(2, 9)]
    id = seeing.submit(prompt, 9, tenant=Scope(ScopeKind.REQUEST, account=b"t" * 16))
    while len(seeing.written[id]) < 4:
        seeing.loop.turn()
        seeing.take()
    seeing.loop.land_all()
    seeing.scheduler.preempt_all()
    seeing.run()
    assert seeing.written[id] == wanted(reference, prompt, seeing.written[id])
    assert (len(seeing.written[id]), seeing.encoded) == (9, 1)


def test_a_sleeping_model_has_no_encoder_and_sees_again_awake(
    seeing: Seeing, reference: Gemma3ForConditionalGeneration
) -> None:
    sleep = SleepController(
        seeing.model.sleeper, seeing.model.memories, seeing.scheduler, seeing.loop, 0, time.monotonic
    )
    prompt: list[Part] = [text(1, 5), random_image(1), text(2, 9)]
    awake = seeing.model.sleeper.usage()
    for residency in (Residency.MEMORY, Residency.DEVICE):
        sleep.order(SetPlacement(residency))
        while sleep.step(resting=True) is None:
            pass
        if residency is Residency.MEMORY:
            assert seeing.model.sleeper.usage().device_bytes == 0
            with pytest.raises(EncoderAsleep):
                seeing.encoder.encode([random_image(1).tobytes()])
            id = seeing.submit(prompt, 6)
    seeing.run()
    assert seeing.written[id] == wanted(reference, prompt, seeing.written[id])
    assert seeing.model.sleeper.usage().weights_bytes == awake.weights_bytes


def test_the_encoder_s_bytes_count_as_weights(folder: Path, seeing: Seeing) -> None:
    unused = ("vision_tower.head.", "vision_tower.vision_model.head.")
    used = [tensor for name, tensor in load_file(folder / "model.safetensors").items() if not name.startswith(unused)]
    tied = next(tensor for tensor in used if tensor.shape == (160, 64))  # packed once more as the head
    assert seeing.model.report.weights_bytes == pytest.approx(sum(each.nbytes for each in [*used, tied]), rel=0.01)


@pytest.mark.parametrize("failure", ["raises", "not finite"])
def test_a_picture_that_fails_ends_its_own_request_alone(
    seeing: Seeing, reference: Gemma3ForConditionalGeneration, failure: str
) -> None:
    bad, encode = random_image(3).tobytes(), seeing.encoder.encode

    def failing(images: Sequence[bytes]) -> list[NDArray[np.float32]]:
        if bad in images and failure == "raises":
            raise RuntimeError("broken")
        rows = encode(images)
        return [np.full_like(own, np.nan) if image == bad else own for image, own in zip(images, rows, strict=True)]

    seeing.encoder.encode = failing  # type: ignore[method-assign]
    good: list[Part] = [text(1, 5), random_image(1), text(2, 9)]
    failed, well = seeing.submit([text(1, 5), random_image(3), text(2, 9)], 6), seeing.submit(good, 6)
    seeing.run()
    assert seeing.ended[failed].reason is FinishReason.ERROR
    assert "image" in seeing.ended[failed].message
    assert seeing.written[failed] == []
    assert seeing.written[well] == wanted(reference, good, seeing.written[well])


def test_what_must_not_be_kept_of_a_picture_is_zeroed(seeing: Seeing) -> None:
    id = seeing.submit([text(1, 5), random_image(1), text(2, 9)], 6, terms=SchedulingTerms(erase=True))
    (image,) = seeing.scheduler.intake.waiting.sequences[1, id].images
    while image.rows_NH is None:
        assert not seeing.loop.idle
        seeing.loop.turn()
    rows_NH = image.rows_NH
    seeing.run()
    assert not rows_NH.any()
    assert not seeing.encoder.rows_EH.any()
    assert (image.pixels, image.rows_NH) == (b"", None)


def test_images_that_no_gateway_sends_are_refused(seeing: Seeing) -> None:
    prompt: list[Part] = [text(1, 5), random_image(1), text(2, 9)]
    image = _inputs(prompt)[0]
    wrong = {
        "bytes": [replace(image, pixels=image.pixels[:-1])],
        "apart": [image, replace(image, first=image.first + TOKENS)],
        "tokens": [replace(image, first=2)],
        "digest": [replace(image, digest=b"short")],
        "order": [replace(image, first=image.first + 9)],
    }
    for images in wrong.values():
        with pytest.raises(SubmitRejected) as refused:
            seeing.submit(prompt, 6, images=images)
        assert refused.value.reason is RejectReason.INVALID
    with pytest.raises(SubmitRejected, match="vocabulary"):
        seeing.submit(prompt, 6, images=[])
    with pytest.raises(SubmitRejected) as blind:
        dataclasses.replace(seeing.door, images=None).sequences(
            Submit(99, bytes(400), scope(), SamplingParams(), 1, images=[image]), 1, 0.0
        )
    assert blind.value.reason is RejectReason.IMAGES


def test_an_account_holds_only_so_many_bytes_of_pictures(seeing: Seeing, monkeypatch: pytest.MonkeyPatch) -> None:
    size = random_image(1).nbytes
    monkeypatch.setattr(prompt_images, "ACCOUNT_BYTES_MAX", 2 * size)
    monkeypatch.setattr(prompt_images, "HELD_BYTES_MAX", 3 * size)
    prompt: list[Part] = [text(1, 5), random_image(1), text(2, 9)]
    for _ in range(2):
        seeing.submit(prompt, 2)
    with pytest.raises(SubmitRejected, match="images are waiting") as full:
        seeing.submit(prompt, 2)
    assert full.value.reason is RejectReason.BUSY
    seeing.submit(prompt, 2, tenant=scope(b"u"))
    with pytest.raises(SubmitRejected):
        seeing.submit(prompt, 2, tenant=scope(b"v"))
    seeing.run()
    seeing.texts([prompt, prompt], 2)


def test_a_forgotten_picture_gets_an_element_that_was_never_used() -> None:
    elements = ImageElements(side=2, tokens=2, token=5, kept=2)

    def element(name: int) -> int:
        tokens_T = np.full(2, PLACEHOLDER, np.uint32)
        elements.replace(tokens_T, [ImageInput(0, bytes([name]) * 32, bytes(12))])
        assert tokens_T[0] == tokens_T[1]
        return int(tokens_T[0])

    first, second = element(1), element(2)
    assert first != second
    assert element(1) == first
    third = element(3)  # 2 is forgotten: 1 was asked for later
    assert element(1) == first
    assert element(2) not in (first, second, third)
