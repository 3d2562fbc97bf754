"""Text to token ids and back, for one model folder: chat template, tokenizer, incremental decode, stop strings.

It knows no requests, tenants or sockets. What it promises: **text from a request never becomes a control token.**
How: an added token ("<|im_end|>") can only be formed if its first and last character stand where the template or
the request put them. So before the template runs, these edge characters ("<", ">", "[", …) are replaced, in every
string of the request, by private-use characters that the request does not contain. What then matches an added token
in the rendered text was written by the template alone. The characters are put back, and the text is encoded:

    as a whole, as the model's own tokenizer does it (bit-equal to `transformers`), where that gives exactly the
    control tokens that the template wrote, which is so for every text that spells none;
    else cut at the template's control tokens, the runs between them encoded by a copy of the tokenizer that knows no
    added tokens. The only cuts are at control tokens, across which a tokenizer never merges either.

A template that looks for an edge character in a message (say, whether it starts with "<tool_response>") does not see
it: text stays text, for the template as well.
"""

import codecs
import copy
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from gateway.template import Template, TemplateError

JSON = Any
ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
_PRIVATE = range(0xF0000, 0xFFFFE)
_ANY_PRIVATE = re.compile("[\U000f0000-\U000ffffd]")


class TextError(ValueError):
    """This text cannot be encoded for this model; the message says what to change."""


class FolderError(ValueError):
    """The folder holds no usable tokenizer or chat template; the message says what is missing."""


class Text:
    """Encodes prompts and decodes completions of one model. Immutable; `encode_*` may be called in any thread."""

    def __init__(self, folder: str | Path, *, today: Callable[[], datetime] = datetime.now) -> None:
        """Reads tokenizer.json, tokenizer_config.json, chat_template.jinja, config.json and generation_config.json,
        of which only the first must be there. Raises FolderError."""
        folder = Path(folder)
        document = _json(folder / "tokenizer.json")
        if document is None:
            raise FolderError(f"{folder} has no tokenizer.json")
        settings = _json(folder / "tokenizer_config.json") or {}
        self._tokenizer = Tokenizer.from_str(json.dumps(document))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._templates = _templates(folder, settings, today)
        sources = "".join(template.source for template in self._templates.values())
        self._control = _control_tokens(document["added_tokens"], sources)
        self._edges = _Edges(self._control)
        self._plain = _Plain(document, self._control)
        self._special = {name: text for name in _SPECIAL if (text := _spelled(settings.get(name))) is not None}
        lead = self._tokenizer.encode("a").ids
        self._lead = lead[: lead.index(first)] if (first := self._plain.encode("a", True)[0]) in lead else []
        self.stop_ids = _stop_ids(folder, self._tokenizer, self._special.get("eos_token"))
        self._bytes = _byte_table(document, self._tokenizer, folder)
        # No token stands for more bytes of text than this; None where that is not known.
        self.token_bytes_max = None if self._bytes is None else max(map(len, self._bytes[0]))

    @property
    def chats(self) -> bool:
        """Whether the folder has a chat template."""
        return bool(self._templates)

    @property
    def takes_tools(self) -> bool:
        """Whether the chat template has a place for tools."""
        return any("tools" in template.names for template in self._templates.values())

    def encode_prompt(self, text: str) -> list[int]:
        """A raw prompt, behind what the tokenizer puts before every text (usually one begin-of-text token)."""
        try:
            ids = _ids(self._tokenizer, text)
            if not self._control.ids.isdisjoint(ids):
                ids = self._plain.encode(text, True)
        except (UnicodeEncodeError, TypeError) as error:
            raise TextError("the prompt holds a lone surrogate, which is no text") from error
        return self._lead + ids

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, JSON]],
        tools: Sequence[Mapping[str, JSON]] | None = None,
        *,
        options: Mapping[str, JSON] | None = None,
        generate: bool = True,
    ) -> list[int]:
        """Messages in the Hugging Face form (role, content, name, tool_calls, …) as the model's template lays them out.

        `options` are further template variables (enable_thinking, …). `generate` opens the assistant's turn.
        Tool arguments that are a JSON text are given to the template as the object. Raises TextError.
        """
        template = self._template(tools)
        plain = [_with_parsed_arguments(message) for message in messages]
        escape = self._edges.escape_for([plain, tools, options])
        variables: dict[str, Any] = {
            **(escape.value(dict(options)) if options else {}),
            **self._special,
            "messages": [escape.message(message) for message in plain],
            "tools": escape.value(list(tools)) if tools else None,
            "documents": None,
            "add_generation_prompt": generate,
        }
        try:
            rendered = template.render(variables)
            return self._encode_rendered(rendered, escape)
        except TemplateError as error:
            raise TextError(escape.restore(str(error))) from error
        except (UnicodeEncodeError, TypeError) as error:
            raise TextError("a message holds a lone surrogate, which is no text") from error

    def _template(self, tools: object) -> Template:
        if not self._templates:
            raise TextError("this model has no chat template: send `prompt` instead of `messages`")
        return (self._templates.get("tool_use") if tools else None) or self._templates["default"]

    def _encode_rendered(self, rendered: str, escape: "_Escape") -> list[int]:
        parts = self._control.pattern.split(rendered) if self._control.pattern else [rendered]
        written = [self._control.by_text[text].id for text in parts[1::2]]
        ids = _ids(self._tokenizer, escape.restore(rendered))
        if written == [id for id in ids if id in self._control.ids]:
            return ids
        return self._encode_cut([escape.restore(part) for part in parts])

    def _encode_cut(self, parts: list[str]) -> list[int]:
        """`parts` alternate: run, control token, run, …, run."""
        ids: list[int] = []
        tokens = [None, *(self._control.by_text[text] for text in parts[1::2]), None]
        for index, run in enumerate(parts[::2]):
            before, after = tokens[index], tokens[index + 1]
            if before is not None:
                ids.append(before.id)
            run = run.lstrip() if before is not None and before.strips_right else run
            run = run.rstrip() if after is not None and after.strips_left else run
            ids += self._plain.encode(run, index == 0)
        return ids

    def decoder(self, stop: Sequence[str] = ()) -> "Decoder":
        """For one sequence's completion."""
        pieces = _Bytes(*self._bytes) if self._bytes is not None else _Streamed(self._tokenizer)
        return Decoder(pieces, stop)

    def token_bytes(self, id: int) -> bytes:
        """One token alone, as logprobs report it. Control tokens show their spelling; unknown ids are empty."""
        if id in self._control.ids or self._bytes is None:
            return (self._tokenizer.id_to_token(id) or "").encode()
        table = self._bytes[0]
        return table[id] if 0 <= id < len(table) else b""


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """By the batch call: it alone lets other threads run meanwhile, and it leaves out offsets, which nobody reads."""
    ids: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
    return ids


# ---- control tokens --------------------------------------------------------------------------------------------

_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class _Added:
    """One added token of tokenizer.json."""

    __slots__ = ("id", "strips_left", "strips_right", "text")

    def __init__(self, entry: dict[str, Any]) -> None:
        self.id: int = entry["id"]
        self.text: str = entry["content"]
        self.strips_left: bool = entry.get("lstrip", False)
        self.strips_right: bool = entry.get("rstrip", False)


class _Control:
    """The tokens that only a template may write: all added ones, but those that are nothing than white space.

    `pattern` finds them in rendered text. Of those that are spelled like words, which have no edges to escape, it
    finds only what stands in the template as it is.
    """

    def __init__(self, tokens: list[_Added], sources: str) -> None:
        self.by_text = {token.text: token for token in tokens}
        self.ids = frozenset(token.id for token in tokens)
        written = [text for text in self.by_text if not _is_word(text) or text in sources]
        longest_first = sorted(written, key=len, reverse=True)
        self.pattern = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if written else None


def _is_word(text: str) -> bool:
    return text[0].isalnum() and text[-1].isalnum()


def _control_tokens(entries: list[dict[str, Any]], sources: str) -> _Control:
    return _Control([_Added(entry) for entry in entries if entry["content"].strip()], sources)


class _Edges:
    """The characters with which control tokens begin and end, and the words that stand between them."""

    def __init__(self, control: _Control) -> None:
        texts = list(control.by_text)
        edges = {text[0] for text in texts} | {text[-1] for text in texts}
        self._edges = sorted(edge for edge in edges if not edge.isalnum() and not edge.isspace())
        # Tokens that begin and end with letters cannot be escaped by their edges: their inside is broken instead.
        self._words = [text for text in texts if _is_word(text)]
        self._inner = {re.sub(r"^\W+|\W+$", "", text) for text in texts}

    def escape_for(self, request: JSON) -> "_Escape":
        """Stand-ins that occur nowhere in the request. Raises TextError where there are none left."""
        taken = {ord(char) for text in _strings(request) if not text.isascii() for char in _ANY_PRIVATE.findall(text)}
        free = (chr(code) for code in _PRIVATE if code not in taken)
        try:
            split = next(free)
            return _Escape([(edge, next(free)) for edge in self._edges], split, self._words, self._inner)
        except StopIteration:
            raise TextError("the messages use every private-use character of Unicode") from None


class _Escape:
    """Replaces what could become part of a control token by stand-ins, and back."""

    def __init__(self, pairs: list[tuple[str, str]], split: str, words: list[str], inner: set[str]) -> None:
        self._pairs = pairs
        self._split = split
        self._words = words
        self._inner = inner

    def message(self, message: Mapping[str, JSON]) -> dict[str, JSON]:
        """One message; a role that we know stays as it is, for templates write it between control characters."""
        escaped: dict[str, JSON] = self.value(dict(message))
        if message.get("role") in ROLES:
            escaped["role"] = message["role"]
        return escaped

    def value(self, value: JSON) -> Any:
        """Any JSON value, keys included; a new one."""
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, Mapping):
            return {self._edged(key): self.value(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self.value(inner) for inner in value]
        return value

    def restore(self, text: str) -> str:
        for edge, stand_in in self._pairs:
            text = text.replace(stand_in, edge)
        return text.replace(self._split, "")

    def _text(self, text: str) -> str:
        word = text.strip() if len(text) < 100 else ""
        if word in self._inner and word not in _STRUCTURE:
            text = text.replace(word, self._split + word, 1)
        return self._edged(text)

    def _edged(self, text: str) -> str:
        for edge, stand_in in self._pairs:
            if edge in text:
                text = text.replace(edge, stand_in)
        for word in self._words:
            text = text.replace(word, word[:-1] + self._split + word[-1])
        return text


# Values that templates compare with: they name kinds and stand in no template between control characters.
_STRUCTURE = frozenset({"function", "object", "array", "string", "number", "integer", "boolean", "null", "text", ""})


def _strings(value: JSON) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield key
            yield from _strings(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _strings(inner)


def _with_parsed_arguments(message: Mapping[str, JSON]) -> Mapping[str, JSON]:
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [_with_parsed_argument(call) for call in calls]}


def _with_parsed_argument(call: JSON) -> JSON:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


class _Plain:
    """The same tokenizer without its control tokens: whatever it is given, it gives no control token back."""

    def __init__(self, document: dict[str, Any], control: _Control) -> None:
        bare = copy.deepcopy(document)
        bare["added_tokens"] = [entry for entry in bare["added_tokens"] if entry["content"] not in control.by_text]
        bare["post_processor"] = bare["truncation"] = bare["padding"] = None
        _forget(bare["model"], control)
        self._first = Tokenizer.from_str(json.dumps(bare))
        self._later = Tokenizer.from_str(json.dumps(bare)) if _never_prepend(bare) else self._first
        for token in control.by_text.values():
            if not control.ids.isdisjoint(self.encode(token.text, True)):
                raise FolderError(f"tokenizer.json: plain text would become the control token {token.text!r}")

    def encode(self, text: str, first: bool) -> list[int]:
        """`first`: the text stands at the very beginning, where some tokenizers put a space before it."""
        return _ids(self._first if first else self._later, text) if text else []


def _forget(model: dict[str, Any], control: _Control) -> None:
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        unknown = model.get("unk_token")
        model["vocab"] = {text: id for text, id in vocabulary.items() if text not in control.by_text or text == unknown}
    elif isinstance(vocabulary, list):
        model["vocab"] = [[text, -1e6 if text in control.by_text else score] for text, score in vocabulary]


def _never_prepend(bare: dict[str, Any]) -> bool:
    """Takes away the space that some tokenizers put before the very first text; false where this one puts none."""
    pre = bare.get("pre_tokenizer") or {}
    firsts = [step for step in [pre, *pre.get("pretokenizers", [])] if step.get("prepend_scheme") == "first"]
    for step in firsts:
        step["prepend_scheme"] = "never"
    return bool(firsts)


# ---- what a folder says ----------------------------------------------------------------------------------------


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (ValueError, OSError) as error:
        raise FolderError(f"{path} is not readable as JSON: {error}") from error


def _spelled(token: JSON) -> str | None:
    """tokenizer_config.json writes a token as its text or as an object with `content`."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _templates(folder: Path, settings: dict[str, Any], today: Callable[[], datetime]) -> dict[str, Template]:
    file = folder / "chat_template.jinja"
    said = file.read_text(encoding="utf-8") if file.is_file() else settings.get("chat_template")
    if isinstance(said, str):
        said = [{"name": "default", "template": said}]
    try:
        templates = {entry["name"]: Template(entry["template"], today=today) for entry in said or []}
    except TemplateError as error:
        raise FolderError(f"{folder}: {error}") from error
    if templates and "default" not in templates:
        raise FolderError(f"{folder}: among its chat templates none is named default")
    return templates


def _stop_ids(folder: Path, tokenizer: Tokenizer, eos: str | None) -> list[int]:
    """What ends a completion: generation_config.json, else config.json, else the tokenizer's eos_token."""
    for name in ("generation_config.json", "config.json"):
        said = (_json(folder / name) or {}).get("eos_token_id")
        if said is not None:
            return list(said) if isinstance(said, list) else [said]
    id = tokenizer.token_to_id(eos) if eos is not None else None
    return [] if id is None else [id]


# ---- back to text ----------------------------------------------------------------------------------------------


def _byte_table(document: dict[str, Any], tokenizer: Tokenizer, folder: Path) -> tuple[list[bytes], bool] | None:
    """(bytes of every id, whether a leading space is dropped), or None where a token's text depends on others.

    Byte-level BPE and SentencePiece-like tokenizers with byte fallback write each token as fixed bytes.
    """
    spell = _speller(document.get("decoder") or {})
    if spell is None:
        return None
    special = {entry["id"] for entry in document["added_tokens"] if entry.get("special")}
    size = max(tokenizer.get_vocab_size(), int((_json(folder / "config.json") or {}).get("vocab_size") or 0))
    size = max(size, 1 + max(tokenizer.get_vocab().values(), default=0))
    table = [b""] * size
    for text, id in tokenizer.get_vocab().items():
        table[id] = b"" if id in special else spell[0](text)
    return table, spell[1]


def _speller(decoder: dict[str, Any]) -> tuple[Callable[[str], bytes], bool] | None:
    kinds = [step["type"] for step in decoder.get("decoders", [decoder])] if decoder else []
    if kinds == ["ByteLevel"]:
        return _byte_level(), False
    if kinds not in (["Replace", "ByteFallback", "Fuse", "Strip"], ["Replace", "ByteFallback", "Fuse"]):
        return None
    space = decoder["decoders"][0]
    if space["pattern"] != {"String": "▁"} or space["content"] != " ":
        return None
    return _byte_fallback, "Strip" in kinds


def _byte_level() -> Callable[[str], bytes]:
    """GPT-2's alphabet: printable bytes are themselves, the others are the characters from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}

    def spell(text: str) -> bytes:
        try:
            return bytes([alphabet[char] for char in text])
        except KeyError:
            return text.encode()

    return spell


def _byte_fallback(text: str) -> bytes:
    if re.fullmatch("<0x[0-9A-Fa-f]{2}>", text):
        return bytes([int(text[3:5], 16)])
    return text.replace("▁", " ").encode()


class _Bytes:
    """Pieces from a byte table: whole UTF-8 characters only, a fraction of a microsecond per token."""

    __slots__ = ("_pending", "_strip", "_table")

    def __init__(self, table: list[bytes], strip: bool) -> None:
        self._table = table
        self._strip = strip
        self._pending = b""

    def push(self, ids: Iterable[int]) -> str:
        table = self._table
        received = self._pending + b"".join([table[id] for id in ids])
        text, used = codecs.utf_8_decode(received, "replace", False)
        self._pending = received[used:]
        if self._strip and text:
            self._strip = False
            text = text.removeprefix(" ")
        return text

    def finish(self) -> str:
        text = self._pending.decode("utf-8", "replace")
        self._pending = b""
        return text


class _Streamed:
    """Pieces from the tokenizer's own stream, for the kinds of decoder that no table can do."""

    __slots__ = ("_open", "_stream", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._open: list[int] = []

    def push(self, ids: Iterable[int]) -> str:
        pieces = []
        for id in ids:
            piece = self._stream.step(self._tokenizer, id)
            self._open = [] if piece is not None else [*self._open, id]
            pieces.append(piece or "")
        return "".join(pieces)

    def finish(self) -> str:
        text: str = self._tokenizer.decode(self._open, skip_special_tokens=True) if self._open else ""
        self._open = []
        return text


class Decoder:
    """One completion's text, piece by piece. Whatever the cuts between pushes, the pieces join to the same text.

    A stop string ends the text before its first character; where several could, the one that is complete first does,
    and of those the longest. Text that may be the beginning of a stop string is held back.
    """

    __slots__ = ("_held", "_longest", "_pieces", "_starts", "_stop", "stopped_by")

    def __init__(self, pieces: "_Bytes | _Streamed", stop: Sequence[str]) -> None:
        self._pieces = pieces
        self._stop = [text for text in stop if text]
        self._starts = tuple({text[:end] for text in self._stop for end in range(1, len(text))})
        self._longest = max((len(text) for text in self._stop), default=0)
        self._held = ""
        self.stopped_by: str | None = None

    def push(self, ids: Iterable[int]) -> str:
        """What may be emitted now that these ids followed; empty once a stop string ended it."""
        if self.stopped_by is not None:
            return ""
        text = self._pieces.push(ids)
        return self._emit(text) if self._stop else text

    def finish(self) -> str:
        """The rest: held text, and a replacement character for a character that stayed incomplete."""
        if self.stopped_by is not None:
            return ""
        text = self._pieces.finish()
        rest = self._emit(text) + self._held if self._stop else text
        self._held = ""
        return rest

    def _emit(self, text: str) -> str:
        if not text:
            return ""
        text = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            _, at, self.stopped_by = min(found)
            self._held = ""
            return text[:at]
        keep = self._overlap(text) if text.endswith(self._starts) else 0
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _overlap(self, text: str) -> int:
        """The length of the longest end of `text` with which a stop string begins."""
        for length in range(min(len(text), self._longest - 1), 0, -1):
            end = text[len(text) - length :]
            if any(stop.startswith(end) for stop in self._stop):
                return length
        raise AssertionError("endswith found an overlap")
