"""Text to token ids for one model folder: chat template, tokenizer, control tokens; and the way back to text.

It knows no requests, tenants or sockets. It promises: **text from a request never becomes a control token.**
Stand-ins tell a template's text and a request's apart (control_tokens.py). The rendered text is cut at the
template's control tokens, the stand-ins are put back, and the runs between are encoded by a copy of the tokenizer that
knows no added tokens. A tokenizer never merges across a control token, so that the ids are those that the model's own
tokenizer gives the whole text (bit-equal to `transformers`) wherever the request spells no control token.

A template that looks for an edge character in a message (say, whether it starts with "<tool_response>") does not see
it: text stays text, for the template as well.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from gateway.text.chat_template import ChatTemplate, TemplateError
from gateway.text.control_tokens import (
    JSON,
    ControlTokenEscaper,
    ControlTokens,
    EscapeTable,
    PlainTokenizer,
    encode_ids,
)
from gateway.text.detokenizer import Detokenizer, TokenByteTable, Utf8Detokenizer, token_byte_table
from gateway.text.encoding_cache import ScopedEncodings
from gateway.text.special_tokens import SpecialTokens

_GIVEN = ("messages", "tools", "documents", "add_generation_prompt")
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TokenizationError(ValueError):
    """This text cannot be encoded for this model; the message says what to change."""


class ModelFolderError(ValueError):
    """The folder holds no usable tokenizer or chat template; the message says what is missing."""


class ModelTokenizer:
    """Encodes prompts and decodes completions of one model. Immutable; `encode_*` may be called in any thread."""

    def __init__(self, folder: str | Path, *, today: Callable[[], datetime] = datetime.now) -> None:
        """Reads tokenizer.json, tokenizer_config.json, chat_template.jinja, config.json and generation_config.json,
        of which only the first must be there. Raises ModelFolderError."""
        folder = Path(folder)
        document = _json(folder / "tokenizer.json")
        if document is None:
            raise ModelFolderError(f"{folder} has no tokenizer.json")
        settings = _json(folder / "tokenizer_config.json") or {}
        self._tokenizer = _tokenizer(folder, document)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._templates = _templates(folder, settings, today)
        self.template = "".join(template.source for template in self._templates.values())
        self.added_tokens = {entry["content"]: int(entry["id"]) for entry in document["added_tokens"]}
        self._control = ControlTokens(document["added_tokens"], self.template)
        self._edges = EscapeTable(
            self._control, frozenset[str]().union(*(template.keys for template in self._templates.values()))
        )
        self._plain = PlainTokenizer(document, self._control)
        for token in self._control.by_text:
            if not self._control.ids.isdisjoint(self._plain.encode(token, True)):
                raise ModelFolderError(f"tokenizer.json: plain text would become the control token {token!r}")
        self._special = {name: text for name in _SPECIAL if (text := _spelled(settings.get(name))) is not None}
        self.special_tokens = SpecialTokens.from_tokenizer(self._tokenizer)
        self.stop_ids = _stop_ids(folder, self._tokenizer, self._special.get("eos_token"))
        vocabulary_size = (_json(folder / "config.json") or {}).get("vocab_size") or 0
        table = token_byte_table(document, self._tokenizer, int(vocabulary_size))
        if table is None:
            raise ModelFolderError("tokenizer.json: its decoder is of a kind whose text cannot be shown token by token")
        self._table = table
        # By what they show: as many as there are kinds of parsers.
        self._tables: dict[frozenset[str], TokenByteTable] = {}
        self.token_bytes_max = table.token_bytes_max

    @property
    def plain_ids(self) -> int:
        """One more than the largest id that plain text becomes."""
        return 1 + max(self._tokenizer.get_vocab(with_added_tokens=False).values(), default=-1)

    @property
    def ids(self) -> frozenset[int]:
        """All ids that it knows."""
        return frozenset(self._tokenizer.get_vocab(with_added_tokens=True).values())

    @property
    def has_chat_template(self) -> bool:
        """Whether the folder has a chat template."""
        return bool(self._templates)

    @property
    def supports_tools(self) -> bool:
        """Whether the chat template has a place for tools."""
        return any("tools" in template.names for template in self._templates.values())

    @property
    def template_options(self) -> frozenset[str]:
        """The further variables of the chat template, which a request may set (enable_thinking, …)."""
        names = {name for template in self._templates.values() for name in template.names}
        return frozenset(names.difference(_GIVEN, _SPECIAL))

    def encode_prompt(self, text: str) -> list[int]:
        """A raw prompt, behind what the tokenizer puts before every text (usually one begin-of-text token). Raises
        TokenizationError."""
        return [
            *self.special_tokens.lead,
            *self.encode_text(text, "the prompt holds a lone surrogate, which is no text"),
        ]

    def encode_text(self, text: str, problem: str = "a lone surrogate is no text") -> list[int]:
        """A text without what `special_tokens` puts around it. Raises TokenizationError, of this problem."""
        try:
            ids = encode_ids(self._tokenizer, text)
            return ids if self._control.ids.isdisjoint(ids) else self._plain.encode(text, True)
        except (UnicodeEncodeError, TypeError) as error:
            raise TokenizationError(problem) from error

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, JSON]],
        tools: Sequence[Mapping[str, JSON]] | None = None,
        *,
        options: Mapping[str, JSON] | None = None,
        generate: bool = True,
        spread: bool = False,
        known: ScopedEncodings | None = None,
        images: tuple[str, str] | None = None,
    ) -> list[int]:
        """Messages in the Hugging Face form (role, content, name, tool_calls, …) as the model's template lays them out.

        `options` are further template variables (enable_thinking, …). `generate` opens the assistant's turn.
        Tool arguments that are a JSON text are given to the template as the object. `spread` lets other threads take a
        part in it, in whose caches words of the text stay then. What `known` has is not encoded again, and the rest
        stays there. `images`: what the template writes for an image, and what the model reads in its place. Raises
        TokenizationError.
        """
        if not self._templates:
            raise TokenizationError("this model has no chat template: send `prompt` instead of `messages`")
        template = (self._templates.get("tool_use") if tools else None) or self._templates["default"]
        plain = [_with_parsed_arguments(message) for message in messages]
        escape = self._edges.escape_for([plain, tools, options])
        if escape is None:
            raise TokenizationError("the messages use every private-use character of Unicode")
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
            if images is not None:
                rendered = rendered.replace(*images)
            return self._encode_rendered(rendered, escape, spread, known)
        except TemplateError as error:
            raise TokenizationError(escape.restore(str(error))) from error
        except (UnicodeEncodeError, TypeError) as error:
            raise TokenizationError("a message holds a lone surrogate, which is no text") from error

    def _encode_rendered(
        self, rendered: str, escape: ControlTokenEscaper, spread: bool, known: ScopedEncodings | None
    ) -> list[int]:
        """What the template wrote, cut at its control tokens: run, control token, run, …, run."""
        parts = self._control.pattern.split(rendered) if self._control.pattern else [rendered]
        runs = [escape.restore(part) for part in parts[::2]]
        tokens = [self._control.by_text[text] for text in parts[1::2]]
        for index, token in enumerate(tokens):
            if token.lstrip:
                runs[index] = runs[index].rstrip()
            if token.rstrip:
                runs[index + 1] = runs[index + 1].lstrip()
        first, *later = self._plain.encode_runs(runs, spread, known)
        ids = list(first)
        for token, run_ids in zip(tokens, later, strict=True):
            ids.append(token.id)
            ids += run_ids
        return ids

    def detokenizer(
        self, stop: Sequence[str] = (), shown: frozenset[str] = frozenset(), min_tokens: int = 0
    ) -> Detokenizer:
        """A detokenizer for one completion. Control tokens in `shown` show their spelling, the others nothing."""
        table = self._tables.get(shown)
        if table is None:
            spelled = {self.added_tokens[text]: text for text in shown & self.added_tokens.keys()}
            table = self._tables[shown] = self._table.with_visible(spelled)
        return Detokenizer(Utf8Detokenizer(table), stop, min_tokens)

    def token_bytes(self, id: int) -> bytes:
        """One token alone, as logprobs report it. Control tokens show their spelling; unknown ids are empty."""
        if id in self._control.ids:
            return (self._tokenizer.id_to_token(id) or "").encode()
        return self._table.bytes_of[id] if 0 <= id < len(self._table.bytes_of) else b""


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


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (ValueError, OSError) as error:
        raise ModelFolderError(f"{path} is not readable as JSON: {error}") from error


def _tokenizer(folder: Path, document: Any) -> Tokenizer:
    try:
        document["added_tokens"]  # which the library does without, and we do not
        return Tokenizer.from_buffer(msgspec.json.encode(document))
    except Exception as error:  # the library raises nothing narrower
        raise ModelFolderError(f"{folder}/tokenizer.json is no tokenizer: {error!r}") from error


def _spelled(token: JSON) -> str | None:
    """tokenizer_config.json writes a token as its text or as an object with `content`."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _templates(folder: Path, settings: dict[str, Any], today: Callable[[], datetime]) -> dict[str, ChatTemplate]:
    file = folder / "chat_template.jinja"
    source = file.read_text(encoding="utf-8") if file.is_file() else settings.get("chat_template")
    if isinstance(source, str):
        source = [{"name": "default", "template": source}]
    try:
        templates = {entry["name"]: ChatTemplate(entry["template"], today=today) for entry in source or []}
    except TemplateError as error:
        raise ModelFolderError(f"{folder}: {error}") from error
    if templates and "default" not in templates:
        raise ModelFolderError(f"{folder}: among its chat templates none is named default")
    return templates


def _stop_ids(folder: Path, tokenizer: Tokenizer, eos: str | None) -> list[int]:
    """The ids that end a completion, of generation_config.json, else config.json, else the tokenizer's eos_token."""
    for name in ("generation_config.json", "config.json"):
        ids = (_json(folder / name) or {}).get("eos_token_id")
        if ids is not None:
            return list(ids) if isinstance(ids, list) else [ids]
    id = tokenizer.token_to_id(eos) if eos is not None else None
    return [] if id is None else [id]
