"""What a choice makes of tokens, for a model that thinks and calls tools, with its markers as control tokens."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from engine.protocol.frames import SequenceFinished
from engine.protocol.types import FinishReason, SamplingParams
from gateway.catalogue.catalogue import Model, open_catalogue
from gateway.cluster.stream import OutputDelta
from gateway.inference.completion import CompletionBuilder, reasoning_enabled
from gateway.inference.prompt import Prompt
from gateway.settings.config import SettingsError, load_config
from gateway.tool_parsers.reasoning import MARKERS, opens_reasoning
from gateway.tool_parsers.registry import TOOL_FORMATS
from tests.support.model_folders import CHATML, EMBER, byte_level, special, write

NAME = "@cf/test/thinker"
TOOLS = [{"type": "function", "function": {"name": "now", "parameters": {}}}]
TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<|im_start|>", "<|im_end|>"]


def model(folder: Path, settings: str = "", template: str = CHATML + "{# <think> #}") -> Model:
    write(folder / "model", byte_level([special(tag) for tag in TAGS]), template, eos_token="<|im_end|>")
    shutil.copy(EMBER / "config.json", folder / "model")
    (folder / "model" / "generation_config.json").write_text("{}")
    (folder / "hearth.toml").write_text(f'[[models]]\nname = "{NAME}"\nfolder = "{folder}/model"\n{settings}')
    found = open_catalogue(load_config(folder / "hearth.toml")).find(NAME)
    assert found is not None
    return found


def prompt(**fields: Any) -> Prompt:
    return Prompt(sampling=SamplingParams(), **{"messages": [], "tools": TOOLS, "stop": [], **fields})


def ids(model: Model, *pieces: str) -> list[int]:
    """Each piece is a control token, or text."""
    return [
        id
        for piece in pieces
        for id in ([model.tokenizer.added_tokens[piece]] if piece in TAGS else model.tokenizer.encode_prompt(piece))
    ]


def received(model: Model, asked: Prompt, tokens: list[int], opened: bool = False) -> CompletionBuilder:
    choice = CompletionBuilder(model, asked, opened)
    last = OutputDelta(0, [], finish=SequenceFinished(0, FinishReason.STOP, len(tokens)))
    for step in (*(OutputDelta(0, [token]) for token in tokens), last):
        if choice.finish is None:
            choice.push(step)
    return choice


CALL = ("<tool_call>", '\n{"name": "now", "arguments": {}}\n', "</tool_call>")


def test_thought_text_and_calls_are_told_apart_by_control_tokens(tmp_path: Path) -> None:
    thinker = model(tmp_path)
    tokens = ids(thinker, "<think>", "\nHm.\n", "</think>", "\n\nI look.\n", *CALL)
    found = received(thinker, prompt(), tokens).completion()
    assert (found.thought, found.text, found.finish) == ("Hm.", "I look.\n", "tool_calls")
    assert [(use.name, json.loads(use.arguments)) for use in found.tool_uses] == [("now", {})]


def test_a_call_that_a_stop_string_cut_is_none_to_answer(tmp_path: Path) -> None:
    thinker = model(tmp_path)
    cut = ("<tool_call>", '\n{"name": "now", "arguments": {"in": "Oslo"}}\n')
    for calls, ends in (((*cut, "</tool_call>"), "stop"), ((*CALL, *cut), "stop"), ((*CALL, "Oslo"), "tool_calls")):
        found = received(thinker, prompt(stop=["Oslo"]), ids(thinker, *calls))
        assert (found.completion().finish, found.stopped_by) == (ends, "Oslo")


def test_a_thought_that_the_prompt_opened_goes_on(tmp_path: Path) -> None:
    thinker = model(tmp_path)
    found = received(thinker, prompt(tools=None), ids(thinker, "Hm.\n", "</think>", "\n\nYes."), opened=True)
    assert (found.completion().thought, found.completion().text) == ("Hm.", "Yes.")
    assert 0 < found.thought_tokens < len(ids(thinker, "Hm.\n", "</think>", "\n\nYes."))
    tail = thinker.tokenizer.detokenizer(shown=MARKERS).push(
        ids(thinker, "<|im_start|>", "assistant\n", "<think>", "\n")
    )
    assert opens_reasoning(tail)


def test_without_tools_the_markers_of_calls_show_nothing(tmp_path: Path) -> None:
    thinker = model(tmp_path)
    found = received(thinker, prompt(tools=None), ids(thinker, "a", *CALL, "b", "<|im_start|>")).completion()
    assert found.text == 'a\n{"name": "now", "arguments": {}}\nb'


def test_a_raw_text_has_no_thoughts(tmp_path: Path) -> None:
    thinker = model(tmp_path)
    raw = prompt(messages=None, text="x", raw=True, tools=None)
    assert not reasoning_enabled(thinker, raw)
    assert received(thinker, raw, ids(thinker, "<think>", "Hm.", "</think>", "Yes.")).completion().text == "Hm.Yes."


def test_the_format_is_that_of_the_template_or_of_the_settings(tmp_path: Path) -> None:
    found = model(tmp_path)
    assert found.tool_format is not None
    assert (found.tool_format.name, found.has_reasoning, found.function_calling) == ("hermes", True, True)
    for name in TOOL_FORMATS:
        said = model(tmp_path, f'tool_format = "{name}"')
        assert said.tool_format is not None
        assert said.tool_format.name == name
    with pytest.raises(SettingsError):
        model(tmp_path, 'tool_format = "telepathy"')


def test_tools_are_for_models_whose_calls_are_known(tmp_path: Path) -> None:
    plain = model(tmp_path, template="{{ tools }}{{ messages[0].content }}")
    assert (plain.tool_format, plain.has_reasoning, plain.function_calling) == (None, False, False)
