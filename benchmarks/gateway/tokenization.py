"""What the gateway's own work on text costs: a chat of 4,000 tokens from its body to token ids, and a token event from
ids to bytes of a stream.

    python -m benchmarks.gateway.tokenization

The chat is of turns of 700 characters in a template like Llama 3's, for a byte-level tokenizer of 32,000 tokens with
Llama 3's pattern, trained here on Python's own library. Its bound is what the tokenizer alone takes for the same text
in one thread (processor time); with all threads (time that passes) it is to be 3 ms. Tokens are the built-in model's,
one in each event; where tools are offered or JSON is asked for, the same text is looked through for calls, or is JSON.

`encode-4000` is the processor time from body to ids of a chat that has reached 4,000 tokens turn by turn, as its client
sends it: the median over conversations of different text, one after the other on one account's cache. Beside it stand
the same chat where nothing of it is known, and the part of all turns' text that the cache had.
"""

import json
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from benchmarks.record import record
from gateway.api.chat import read_chat
from gateway.api.dialect import Dialect, GenerationRequest
from gateway.api.responses_request import read_responses
from gateway.api.run_native import read_run_native
from gateway.catalogue.catalogue import Model, open_catalogue
from gateway.cluster.stream import OutputDelta
from gateway.http import sse
from gateway.inference.completion import CompletionBuilder
from gateway.inference.reply import RunningUsage
from gateway.settings.config import load_config
from gateway.text.control_tokens import encode_ids
from gateway.text.encoding_cache import EncodingCache, ScopedEncodings
from gateway.text.tokenizer import ModelTokenizer

RUNS: Final = 40
CHAT_TOKENS: Final = 4_000
CHAT_MS: Final = 3.0
EVENTS: Final = 2_000
PATTERN: Final = "|".join(
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    )
)
CONTROL: Final = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
TEMPLATE: Final = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
CHATML: Final = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MISTRAL: Final = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
)
# A template, and the control tokens in it: its first one is that of the beginning.
TEMPLATES: Final = {
    "Llama 3": (TEMPLATE, CONTROL),
    "ChatML": (CHATML, ("<|endoftext|>", "<|im_start|>", "<|im_end|>")),
    "Mistral": (MISTRAL, ("<s>", "[INST]", "[/INST]", "</s>")),
}
ENCODE_MS: Final = 4.0
CONVERSATIONS: Final = 20
TOOLS: Final = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}]
USER: Final = [{"role": "user", "content": "hi"}]


def library() -> list[str]:
    """Some millions of characters of English and code that every machine with Python has."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return [file.read_text(errors="ignore") for file in files]


def folder(texts: list[str], where: Path, template: str = TEMPLATE, control: Sequence[str] = CONTROL) -> Path:
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    split = pre_tokenizers.Split(Regex(PATTERN), "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=32_000, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in control])
    tokenizer.save(str(where / "tokenizer.json"))
    settings = {"chat_template": template, "bos_token": control[0], "eos_token": control[-1]}
    (where / "tokenizer_config.json").write_text(json.dumps(settings))
    return where


def conversation(text: ModelTokenizer, source: str) -> list[dict[str, Any]]:
    """Turns of about 700 characters, until there are tokens enough."""
    turns: list[dict[str, Any]] = [{"role": "system", "content": "You are a helpful assistant."}]
    for at in range(0, len(source), 700):
        turns.append({"role": ("user", "assistant")[len(turns) % 2 == 0], "content": source[at : at + 700]})
        if len(text.encode_chat(turns)) >= CHAT_TOKENS:
            break
    return turns


def best_ms(act: Callable[[], object], clock: Callable[[], float] = time.thread_time) -> float:
    best = float("inf")
    for _ in range(RUNS):
        began = clock()
        act()
        best = min(best, clock() - began)
    return round(best * 1e3, 3)


def a_chat() -> None:
    texts = library()
    with tempfile.TemporaryDirectory() as where:
        text = ModelTokenizer(folder(texts, Path(where)))
        prose = "".join(part for source in texts[100:] for part in source.split('"""')[1::2])
        turns = conversation(text, prose)
        body = chat_body(turns)
        dialect, ids = read_chat, text.encode_chat(turns)
        shape = f"chat of {len(ids)} tokens in {len(turns)} turns and {len(body)} bytes"
        assert text.encode_chat(turns, spread=True) == ids

        def whole(spread: bool) -> None:
            prompt = dialect(body, b"", None, 7)
            assert isinstance(prompt, GenerationRequest)
            assert prompt.prompt.messages is not None
            text.encode_chat(prompt.prompt.messages, prompt.prompt.tools, spread=spread)

        rendered = "\n".join(turn["content"] for turn in turns)
        alone = best_ms(lambda: encode_ids(text._tokenizer, rendered))
        record("text", f"{shape}: the body to a prompt", best_ms(lambda: dialect(body, b"", None, 7)), "ms")
        record("text", f"{shape}: body to ids, one thread", best_ms(lambda: whole(False)), "ms", bound=alone)
        threads_ms = best_ms(lambda: whole(True), time.perf_counter)
        record("text", f"{shape}: body to ids, all threads", threads_ms, "ms", bound=CHAT_MS)


def conversations() -> None:
    texts = library()
    prose = "".join(part for source in texts[100:] for part in source.split('"""')[1::2])
    length = len(prose) // CONVERSATIONS
    for name, (template, control) in TEMPLATES.items():
        with tempfile.TemporaryDirectory() as where:
            text = ModelTokenizer(folder(texts[:60], Path(where), template, control))
        encodings = CountedEncodings()
        known, first_ms, last_ms = encodings.of_scope("account", b"", 0, None), [], []
        for place in range(CONVERSATIONS):
            turns = conversation(text, prose[place * length :][:length])[1:]  # Mistral's has no place for a system
            for count in range(1, len(turns) + 1, 2):
                body = chat_body(turns[:count])
                ids, taken_ms = body_to_ids(text, body, known)
            last_ms.append(taken_ms)
            empty = EncodingCache().of_scope("account", b"", 0, None)
            alone, taken_ms = body_to_ids(text, body, empty)
            assert alone == ids == body_to_ids(text, body, None)[0]
            first_ms.append(taken_ms)
        shape = "encode-4000" if name == "Llama 3" else f"encode-4000, {name}"
        record("text", shape, round(statistics.median(last_ms), 3), "ms", bound=ENCODE_MS)
        record("text", f"{shape}, nothing known", round(statistics.median(first_ms), 3), "ms")
        record("text", f"{shape}, text that was known", round(100 * encodings.hits / encodings.asked, 1), "%")


class CountedEncodings(EncodingCache):
    """Counts characters that were asked for, and those that were there."""

    asked = hits = 0

    def find(self, scope: ScopedEncodings, tokenizer: Hashable, texts: Iterable[str]) -> dict[str, Sequence[int]]:
        texts = list(texts)
        found = super().find(scope, tokenizer, texts)
        self.asked += sum(map(len, texts))
        self.hits += sum(map(len, found))
        return found


def chat_body(turns: list[dict[str, Any]]) -> bytes:
    return msgspec.json.encode({"model": "@cf/a/b", "messages": turns, "max_tokens": 100, "stream": True})


def body_to_ids(text: ModelTokenizer, body: bytes, known: ScopedEncodings | None) -> tuple[list[int], float]:
    """The ids, and the milliseconds of processor time of all threads."""
    began = time.process_time()
    request = read_chat(body, b"", None, 7)
    assert isinstance(request, GenerationRequest)
    assert request.prompt.messages is not None
    ids = text.encode_chat(request.prompt.messages, request.prompt.tools, known=known)
    return ids, (time.process_time() - began) * 1e3


def events_us(model: Model, dialect: Dialect, named: str | None, body: dict[str, Any], prose: str) -> float:
    """Microseconds of processor time for each token: decoded, searched for calls, and written as an event."""
    prompt = dialect(msgspec.json.encode({**body, "stream": True}), b"", named, 7)
    assert isinstance(prompt, GenerationRequest)
    steps = [OutputDelta(0, [id]) for id in model.tokenizer.encode_prompt(prose)[:EVENTS]]
    best = float("inf")
    for _ in range(9):
        choice, reply = (
            CompletionBuilder(model, prompt.prompt, False),
            prompt.reply(model.name, "0" * 36, 1_800_000_000, sse.paddings()),
        )
        reply.begin(RunningUsage(5, 0))
        began = time.process_time()
        for step in steps:
            parts = choice.push(step)
            if parts:
                choice.render(reply, 0, parts, [])
        best = min(best, time.process_time() - began)
    return round(best / len(steps) * 1e6, 2)


def events() -> None:
    model = next(iter(open_catalogue(load_config())))
    prose = "The quick brown fox jumps over the lazy dog, again and again: größer, 東京. " * 400
    document = json.dumps([{"name": "fox", "over": ["dog", "lazy"], "times": 7}] * 400)
    chat = {"model": model.name, "messages": USER}
    forms: dict[str, tuple[Dialect, str | None, dict[str, Any]]] = {
        "native": (read_run_native, model.name, {"messages": USER}),
        "chat": (read_chat, None, chat),
        "responses": (read_responses, None, {"model": model.name, "input": "hi"}),
    }
    plain = {}
    for name, (dialect, named, body) in forms.items():
        plain[name] = events_us(model, dialect, named, body, prose)
        record("text", f"a token event, {name}", plain[name], "µs")
    tools = events_us(model, read_chat, None, {**chat, "tools": TOOLS}, prose)
    record("text", "a token event, chat, tools offered", tools, "µs", bound=round(1.2 * plain["chat"], 2))
    same = events_us(model, read_chat, None, chat, document)
    constrained = events_us(model, read_chat, None, {**chat, "response_format": {"type": "json_object"}}, document)
    record("text", "a token event, chat, a JSON document", constrained, "µs", bound=round(1.2 * same, 2))


if __name__ == "__main__":
    a_chat()
    conversations()
    events()
