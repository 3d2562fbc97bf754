"""Images from end to end: a small Gemma 3 that sees, served by the commands that an operator types, answers as the
reference library does with the same pictures, and refuses what is none."""

import base64
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image
from tokenizers import Tokenizer
from transformers import Gemma3ForConditionalGeneration
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

from tests.end_to_end.conftest import EMBER, Hearth, run_hearth, serving
from tests.support.seeing_models import SIDE, TOKENS, greedy_seeing, write_seeing_folder

SEEING = "@cf/acme/seeing"


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Hearth, Gemma3ForConditionalGeneration, Path]]:
    place = tmp_path_factory.mktemp("images")
    folder, reference = write_seeing_folder(place / "seeing")
    assert "whole" in run_hearth(place, "models", "add", SEEING, "seeing", "--dtype", "float32")
    with serving(place, f'[[models]]\nname = "{EMBER}"\n') as hearth:
        yield hearth, reference, folder


def picture(seed: int, size: tuple[int, int] = (120, 90)) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (*size[::-1], 3), np.uint8)
    return Image.fromarray(pixels).resize(size, Image.Resampling.NEAREST)


def data_uri(image: Image.Image, format: str = "PNG") -> str:
    buffer = io.BytesIO()
    image.save(buffer, format)
    return f"data:image/{format.lower()};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def part(image: Image.Image | str) -> dict[str, Any]:
    url = image if isinstance(image, str) else data_uri(image)
    return {"type": "image_url", "image_url": {"url": url}}


def ask(hearth: Hearth, content: Any, model: str = SEEING, tokens: int = 12) -> httpx.Response:
    body = {
        "model": model, "messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": tokens,
        "ignore_eos": True,
    }  # fmt: skip
    with hearth.client() as client:
        return client.post(f"/client/v4/accounts/{hearth.account_id}/ai/v1/chat/completions", json=body)


def reference_answer(
    reference: Gemma3ForConditionalGeneration, folder: Path, content: Sequence[str | Image.Image], tokens: int = 12
) -> tuple[str, int]:
    """The library's answer, and how many tokens its prompt has. It scales the pictures itself."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    image = f"\n\n<start_of_image>{'<image_soft_token>' * TOKENS}<end_of_image>\n\n"
    turn = "".join(each if isinstance(each, str) else image for each in content)
    text = f"<bos><start_of_turn>user\n{turn}<end_of_turn>\n<start_of_turn>model\n"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    processor = Gemma3ImageProcessorPil(size={"height": SIDE, "width": SIDE}, image_mean=[0.5] * 3, image_std=[0.5] * 3)
    images = [each for each in content if not isinstance(each, str)]
    pixels = processor(images, return_tensors="pt")["pixel_values"] if images else []
    written: list[int] = []
    while len(written) < tokens:
        written = greedy_seeing(reference, ids, pixels, [*written, 0])
    return tokenizer.decode(written, skip_special_tokens=True), len(ids)


def test_answers_are_those_of_the_reference_library_and_count_the_pictures_tokens(
    seeing: tuple[Hearth, Gemma3ForConditionalGeneration, Path],
) -> None:
    hearth, reference, folder = seeing
    first, second = picture(1), picture(2, (50, 160))
    conversations: list[list[str | Image.Image]] = [
        [first, "what is this?"],
        ["look here", second, "and", first, "which one?"],
        ["no picture"],
    ]
    for content in conversations:
        parts = [{"type": "text", "text": each} if isinstance(each, str) else part(each) for each in content]
        answer = ask(hearth, parts).raise_for_status().json()
        wanted, prompt_tokens = reference_answer(reference, folder, content)
        assert answer["choices"][0]["message"]["content"] == wanted
        assert answer["usage"]["prompt_tokens"] == prompt_tokens
    again = ask(hearth, [part(first), {"type": "text", "text": "what is this?"}]).json()
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= TOKENS, "the repeated picture was computed again"


def test_the_dialects_agree_on_a_picture(
    seeing: tuple[Hearth, Gemma3ForConditionalGeneration, Path],
) -> None:
    hearth, _, _ = seeing
    uri, question = data_uri(picture(1, (40, 30))), "what is this?"
    data = uri.partition(",")[2]
    wanted = ask(hearth, [part(uri), {"type": "text", "text": question}]).json()
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
    turn = {"role": "user", "content": [image, {"type": "text", "text": question}]}
    base = f"/client/v4/accounts/{hearth.account_id}/ai"
    with hearth.client() as client:
        message = (
            client.post(
                f"{base}/v1/messages", json={"model": SEEING, "messages": [turn], "max_tokens": 12, "temperature": 0}
            )
            .raise_for_status()
            .json()
        )
        counted = client.post(f"{base}/v1/messages/count_tokens", json={"model": SEEING, "messages": [turn]}).json()
        native = [
            client.post(
                f"{base}/run/{SEEING}",
                json={"prompt": question, "image": image, "max_tokens": 12, "temperature": 0, "ignore_eos": True},
            ).raise_for_status().json()["result"]
            for image in (data, [*base64.b64decode(data)])
        ]  # fmt: skip
        parts = [{"type": "input_image", "image_url": uri}, {"type": "input_text", "text": question}]
        asked = {"model": SEEING, "input": [{"role": "user", "content": parts}], "ignore_eos": True, "temperature": 0}
        response = (
            client.post(f"{base}/v1/responses", json={**asked, "max_output_tokens": 12}).raise_for_status().json()
        )
    text, tokens = wanted["choices"][0]["message"]["content"], wanted["usage"]["prompt_tokens"]
    assert text.startswith(message["content"][0]["text"])
    assert (
        message["usage"]["input_tokens"] + message["usage"]["cache_read_input_tokens"],
        counted["input_tokens"],
    ) == (
        tokens,
        tokens,
    )
    assert (response["output"][0]["content"][0]["text"], response["usage"]["input_tokens"]) == (text, tokens)
    assert [(each["response"], each["usage"]["prompt_tokens"]) for each in native] == [(text, tokens)] * 2


def test_what_a_text_spells_is_no_picture(seeing: tuple[Hearth, Gemma3ForConditionalGeneration, Path]) -> None:
    """Bytes stand for what the caller spells: no token of these names comes of it."""
    hearth, _, _ = seeing
    spelled = "<start_of_image><image_soft_token><end_of_image>"
    plain = ask(hearth, spelled).raise_for_status().json()["usage"]["prompt_tokens"]
    assert plain > 30
    beside = ask(hearth, [part(picture(1)), {"type": "text", "text": spelled}]).raise_for_status().json()
    assert beside["usage"]["prompt_tokens"] < plain + TOKENS + 10


def bomb() -> str:
    """A picture of 400 million pixels in some 50 KB."""
    return data_uri(Image.new("1", (20_000, 20_000)))


def animated() -> str:
    buffer, frames = io.BytesIO(), [picture(seed, (8, 8)) for seed in (1, 2)]
    frames[0].save(buffer, "GIF", save_all=True, append_images=frames[1:])
    return f"data:image/gif;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def cut() -> str:
    whole = base64.b64decode(data_uri(picture(1)).partition(",")[2])
    return f"data:image/png;base64,{base64.b64encode(whole[:-900]).decode()}"


SVG = base64.b64encode(b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>').decode()


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("https://example.com/cat.png", "no address is fetched"),
        ("file:///etc/passwd", "no address is fetched"),
        (f"data:image/svg+xml;base64,{SVG}", "SVG"),
        (f"data:image/png;base64,{SVG}", "SVG"),
        (data_uri(picture(1), "JPEG").replace("image/jpeg", "image/png"), "is called image/png"),
        (data_uri(picture(1), "TIFF").replace("image/tiff", "image/png"), "no PNG, JPEG, WebP or GIF"),
        (data_uri(picture(1, (500, 2))), "times the other"),
        ("data:image/png;base64,@@@@", "base64"),
        ("data:image/png;base64,", "empty"),
        ("data:image/png,abc", "not in base64"),
        (bomb(), "pixels"),
        (animated(), "animated"),
        (cut(), "cut or damaged"),
    ],
)
def test_what_is_no_picture_is_refused_by_name(
    seeing: tuple[Hearth, Gemma3ForConditionalGeneration, Path], url: str, why: str
) -> None:
    hearth, _, _ = seeing
    refused = ask(hearth, [part(url), {"type": "text", "text": "what is this?"}])
    assert refused.status_code == 400, refused.text
    assert why in refused.json()["error"]["message"]
    assert refused.json()["error"]["param"] == "messages[0].content[0].image_url"


def test_pictures_are_refused_where_there_are_too_many_or_nobody_sees_them(
    seeing: tuple[Hearth, Gemma3ForConditionalGeneration, Path],
) -> None:
    hearth, _, _ = seeing
    small = part(picture(1, (4, 4)))
    for content, model, why in (
        ([small] * 1000, SEEING, "at most 16"),
        ([small], EMBER, "takes no images"),
    ):
        refused = ask(hearth, content, model)
        assert refused.status_code == 400
        assert why in refused.json()["error"]["message"]
    assert ask(hearth, "still there?").status_code == 200


def test_lists_say_which_model_sees(seeing: tuple[Hearth, Gemma3ForConditionalGeneration, Path]) -> None:
    hearth, _, _ = seeing
    with hearth.client() as client:
        base = f"/client/v4/accounts/{hearth.account_id}/ai/models/search"
        models = {item["name"]: item for item in client.get(base).json()["result"]}
        offers = {item["id"]: item for item in client.get(base, params={"format": "openrouter"}).json()["data"]}
    sees = {name: {"property_id": "vision", "value": "true"} in item["properties"] for name, item in models.items()}
    assert sees == {SEEING: True, EMBER: False}
    assert offers[SEEING]["input_modalities"] == ["text", "image"]
    assert offers[EMBER]["input_modalities"] == ["text"]
