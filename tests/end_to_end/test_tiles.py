"""Pictures cut into tiles from end to end: a small Llama 4 that sees, served by the commands that an operator types,
answers as the reference library does with the tiles and the words that its processor makes of the same pictures."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer
from transformers import Llama4ForConditionalGeneration

from tests.end_to_end.conftest import EMBER, Hearth, run_hearth, serving
from tests.end_to_end.test_images import ask, data_uri, part, picture
from tests.support.seeing_models import SIDE, TOKENS
from tests.support.tiling_models import greedy_tiling, picture_text, reference_tiles, write_tiling_folder

TILING, TILES_MAX = "@cf/acme/tiling", 6
Tiling = tuple[Hearth, Llama4ForConditionalGeneration, Path]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiles")


@pytest.fixture(scope="module")
def tiling(place: Path) -> Iterator[Tiling]:
    folder, reference = write_tiling_folder(place / "tiling", TILES_MAX)
    assert "whole" in run_hearth(place, "models", "add", TILING, "tiling", "--dtype", "float32")
    with serving(place, f'[[models]]\nname = "{EMBER}"\n') as hearth:
        yield hearth, reference, folder


def reference_answer(
    reference: Llama4ForConditionalGeneration, folder: Path, content: Sequence[str | Image.Image], tokens: int = 8
) -> tuple[str, int]:
    """The library's answer, and how many tokens its prompt has. It cuts the pictures itself, and says what stands for
    them."""
    tokenizer, tiles, turn = Tokenizer.from_file(str(folder / "tokenizer.json")), list[np.ndarray](), ""
    for each in content:
        if isinstance(each, str):
            turn += each
        else:
            own, (rows, columns) = reference_tiles(np.asarray(each), SIDE, TILES_MAX)
            tiles += list(own)
            turn += picture_text(rows, columns)
    text = f"<|begin_of_text|><|header_start|>user<|header_end|>\n\n{turn}<|eot|>"
    text += "<|header_start|>assistant<|header_end|>\n\n"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    written: list[int] = []
    with torch.inference_mode():
        while len(written) < tokens:
            written = greedy_tiling(reference, ids, tiles, [*written, 0])
    return tokenizer.decode(written, skip_special_tokens=True), len(ids)


def test_answers_are_those_of_the_reference_library_and_count_the_tiles_tokens(tiling: Tiling) -> None:
    hearth, reference, folder = tiling
    # The last is not scaled: a text of one short turn hangs on each level that Pillow and torch round apart.
    wide, high, small = picture(1, (300, 100)), picture(2, (90, 170)), picture(3, (SIDE, 60))
    conversations: list[list[str | Image.Image]] = [
        [small, "what is this?"],
        ["look here", wide, "and", high, "which one?"],
        [small, high],
        ["no picture"],
    ]
    for content in conversations:
        parts = [{"type": "text", "text": each} if isinstance(each, str) else part(each) for each in content]
        answered = ask(hearth, parts, TILING, 8)
        assert answered.status_code == 200, answered.text
        answer = answered.json()
        wanted, prompt_tokens = reference_answer(reference, folder, content)
        assert answer["choices"][0]["message"]["content"] == wanted
        assert answer["usage"]["prompt_tokens"] == prompt_tokens
    again = ask(hearth, [part(small), {"type": "text", "text": "what is this?"}], TILING).json()
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= TOKENS, "the repeated picture was computed again"


def test_tokens_are_counted_by_a_picture_s_size(tiling: Tiling) -> None:
    hearth, reference, folder = tiling
    with hearth.client() as client:
        for size in ((300, 100), (40, 30), (90, 170)):
            data = data_uri(picture(1, size)).partition(",")[2]
            image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
            turn = {"role": "user", "content": [image, {"type": "text", "text": "what is this?"}]}
            url = f"/client/v4/accounts/{hearth.account_id}/ai/v1/messages/count_tokens"
            counted = client.post(url, json={"model": TILING, "messages": [turn]}).raise_for_status().json()
            _, wanted = reference_answer(reference, folder, [picture(1, size), "what is this?"], 1)
            assert counted["input_tokens"] == wanted


def test_what_a_text_spells_is_no_tile(tiling: Tiling) -> None:
    hearth, _, _ = tiling
    spelled = "<|image_start|><|image|><|patch|><|tile_x_separator|><|image_end|>"
    plain = ask(hearth, spelled, TILING).raise_for_status().json()["usage"]["prompt_tokens"]
    assert plain > 30
    beside = ask(hearth, [part(picture(1, (40, 30))), {"type": "text", "text": spelled}], TILING)
    assert beside.raise_for_status().json()["usage"]["prompt_tokens"] < plain + TOKENS + 10


def test_what_is_no_picture_is_refused_before_it_is_cut(tiling: Tiling) -> None:
    hearth, _, _ = tiling
    for url, why in (
        ("data:image/png;base64,AAAA", "no PNG, JPEG, WebP or GIF"),
        (data_uri(Image.new("1", (20_000, 20_000))), "pixels; at most"),
        (data_uri(picture(1))[:-400], "cut or damaged"),
    ):
        refused = ask(hearth, [part(url), {"type": "text", "text": "what is this?"}], TILING)
        assert refused.status_code == 400, refused.text
        assert why in refused.json()["error"]["message"]
        assert refused.json()["error"]["param"] == "messages[0].content[0].image_url"


def test_a_model_that_cuts_pictures_is_listed_as_one_that_sees(tiling: Tiling, place: Path) -> None:
    hearth, _, folder = tiling
    shown = json.loads(run_hearth(place, "models", "show", TILING, "--json"))
    assert shown["weights_bytes"] == (folder / "model.safetensors").stat().st_size
    with hearth.client() as client:
        models = client.get(f"/client/v4/accounts/{hearth.account_id}/ai/models/search").json()["result"]
    sees = {item["name"]: {"property_id": "vision", "value": "true"} in item["properties"] for item in models}
    assert sees == {TILING: True, EMBER: False}
