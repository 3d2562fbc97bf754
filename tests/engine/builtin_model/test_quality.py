"""Ember as it is shipped: its files, its tokenizer and template, and a sample of its held-out accuracy."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.ember import corpus, train
from benchmarks.ember.measure import answers, measure
from benchmarks.ember.tokenizer import CHAT_TEMPLATE, END, SPECIALS
from benchmarks.ember.values import Draw, Split, belongs

MODEL = Path(__file__).parents[3] / "engine" / "builtin_model"
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Name"},
                "unit": {"type": "string", "enum": ["c", "f"]},
            },
            "required": ["city"],
        },
    },
}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture(scope="module")
def model() -> Any:
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()


def test_weights_are_bf16_and_at_most_30_mb(model: Any) -> None:
    assert (MODEL / "model.safetensors").stat().st_size <= 30_000_000
    assert json.loads((MODEL / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert model.config.max_position_embeddings == 8192


def test_end_of_turn_is_the_eos_everywhere(tokenizer: Any, model: Any) -> None:
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    assert tokenizer.eos_token_id == model.config.eos_token_id == model.generation_config.eos_token_id == end
    assert tokenizer.bos_token_id == model.config.bos_token_id == SPECIALS.index("<|begin|>")


@settings(max_examples=200, deadline=None)
@given(st.text())
def test_tokenizer_returns_any_text(text: str) -> None:
    tokenizer = _tokenizer()
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids, skip_special_tokens=False) == text


def _tokenizer(kept: list[Tokenizer] = []) -> Tokenizer:  # noqa: B006  one tokenizer for all examples
    if not kept:
        kept.append(Tokenizer.from_file(str(MODEL / "tokenizer.json")))
    return kept[0]


def test_each_digit_and_capital_is_its_own_token(tokenizer: Any) -> None:
    assert tokenizer.tokenize("KX-4471") == ["K", "X", "-", "4", "4", "7", "1"]


def test_a_name_has_the_same_tokens_wherever_it_stands(tokenizer: Any) -> None:
    alone = tokenizer.tokenize("Velkor")
    assert tokenizer.tokenize('"Velkor"')[1:-1] == alone
    assert tokenizer.tokenize("a Velkor")[-len(alone) :] == alone


def test_template_renders_every_role(tokenizer: Any) -> None:
    call = {"function": {"name": "get_weather", "arguments": {"city": "Köln"}}}
    messages = [
        {"role": "system", "content": "You are Pip."},
        {"role": "user", "content": " Hi "},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": '{"temp": 21}'},
        {"role": "assistant", "content": "The temp is 21."},
    ]
    assert tokenizer.apply_chat_template(messages, tools=[TOOL], add_generation_prompt=True, tokenize=False) == (
        "<|begin|><|tools|>get_weather: The weather in a city.\n"
        "- city (string, required): Name\n- unit (one of c, f)<|end|>"
        "<|system|>You are Pip.<|end|><|user|>Hi<|end|>"
        '<|assistant|>{"name": "get_weather", "arguments": {"city": "Köln"}}<|end|>'
        '<|tool|>{"temp": 21}<|end|><|assistant|>The temp is 21.<|end|><|assistant|>'
    )


def test_flat_tools_and_written_arguments_render_alike(tokenizer: Any) -> None:
    def rendered(tool: dict[str, Any], call: dict[str, Any]) -> str:
        messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
        text: str = tokenizer.apply_chat_template(messages, tools=[tool], tokenize=False)
        return text

    nested = rendered(TOOL, {"function": {"name": "get_weather", "arguments": {"city": "Rome"}}})
    flat = rendered(TOOL["function"], {"name": "get_weather", "arguments": '{"city": "Rome"}'})  # type: ignore[arg-type]
    assert nested == flat


def test_training_reads_what_the_template_writes(tokenizer: Any) -> None:
    assert tokenizer.chat_template == CHAT_TEMPLATE
    compared = 0
    for seed in range(120):
        conversation = corpus.document(Draw(seed), 150)
        if not conversation.plain:
            compared += 1
            tools = conversation.tools or None
            text = tokenizer.apply_chat_template(conversation.messages, tools=tools, tokenize=False)
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            assert ids == train.encoded(_tokenizer(), conversation)[0], seed
    assert compared > 100


def test_no_value_is_both_trained_on_and_held_out() -> None:
    for split in Split:
        draw = Draw(1, split)
        for value in (draw.proper(), draw.code(), draw.phone(), draw.password(), draw.email()):
            assert belongs(value, split)
            assert not belongs(value, Split.HELDOUT if split is Split.TRAIN else Split.TRAIN)


def test_held_out_examples_follow_from_their_seed() -> None:
    for kind in corpus.KINDS:
        assert corpus.heldout(kind, 7) == corpus.heldout(kind, 7) != corpus.heldout(kind, 8)


def test_a_packed_batch_covers_its_tokens_with_documents() -> None:
    batch = train.pack(_tokenizer(), "test", 100, 1024, total=8192)
    lengths = batch.starts[1:] - batch.starts[:-1]
    assert batch.starts[-1] == 8192
    assert lengths.min() >= 0
    assert lengths.max() <= 1024
    assert (batch.said == train.SAID).any()


@pytest.mark.parametrize(
    ("kind", "size", "count", "floor"),
    [
        ("facts", 120, 40, 0.95),
        ("facts", 1300, 4, 0.75),
        ("tools", 0, 30, 0.9),
        ("follow-ups", 100, 12, 0.9),
        ("unknown", 100, 12, 0.9),
        ("results", 0, 12, 0.9),
    ],
)
def test_ember_answers_what_it_never_saw(
    model: Any, tokenizer: Any, kind: str, size: int, count: int, floor: float
) -> None:
    figure = measure(model, tokenizer, kind, size, count, batch=count, shown=3)
    assert figure.right >= floor * count, figure


PROMPTS = (
    "You are the assistant of Harbour Books. Opening hours: Monday to Friday, 9:00 to 18:00.",
    "You are the assistant of Harbour Books. Opening hours: Monday to Friday, 9:00 to 18:00. Answer shortly.",
    "We are Nordlicht, a bakery. Open Tuesday to Sunday 7 to 13. Rye bread costs 4.20 euro. Ask for Jana.",
    "Opening hours: Mon-Fri 8-16, Sat 9-12. Address: Mill Lane 4. Owner: Petra Lund.",
    "You are a helpful assistant.",
)
ASKED = ("When are you open?", "opening hours", "Where are you?", "Hello!", "Tell me a story.", "Thank you!")


@pytest.mark.parametrize("prompt", PROMPTS)
def test_no_answer_runs_on(model: Any, tokenizer: Any, prompt: str) -> None:
    examples = [
        corpus.Example("", [{"role": "system", "content": prompt}, {"role": "user", "content": asked}], [], "")
        for asked in ASKED
    ]
    for asked, answer in zip(ASKED, answers(model, tokenizer, examples, most=60)[0], strict=True):
        assert answer.endswith(END), (asked, answer)
