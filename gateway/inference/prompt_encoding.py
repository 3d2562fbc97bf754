"""A prompt as token ids of its model, checked against what only the model knows: its template, vocabulary, context.

It knows no replica and no limits of accounts.
"""

import asyncio
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from engine.protocol.types import Grammar, GrammarKind, ImageInput, ScopeKind
from gateway import errors
from gateway.catalogue.catalogue import Model
from gateway.images.placing import decode_images, lay_out, require_vision, with_images
from gateway.images.tiling import PictureLayout
from gateway.inference.cache_scope import scope_of
from gateway.inference.completion import reasoning_enabled
from gateway.inference.context import InferenceContext
from gateway.inference.grammar import answer_grammar
from gateway.inference.lifecycle import InferenceCall
from gateway.inference.prompt import Prompt
from gateway.text.encoding_cache import ScopedEncodings
from gateway.text.tokenizer import TokenizationError
from gateway.tool_parsers.reasoning import MARKERS, grammar_after_reasoning, opens_reasoning
from tenants.records.accounts import cache_retention_s

REASONING_TAIL_TOKENS: Final = 16  # the end of a prompt, with "<think>" and some line breaks behind it


class EncodedPrompt(NamedTuple):
    """A prompt's ids, and how the images in it become tiles."""

    ids: list[int]
    layouts: Sequence[PictureLayout] = ()


async def encode_prompt(call: InferenceCall, prompt: Prompt) -> EncodedPrompt:
    """Raises ApiError where the model's template or tokenizer cannot take the prompt, or the model none of its images.

    A text that cannot fit is not encoded at all.
    """
    context, model = call.context, call.model
    known = _known_encodings(call, prompt)
    token_chars = model.tokenizer.token_bytes_max
    context_tokens = context.fleet.context_tokens(model.name, model.context_tokens)
    if token_chars is not None and prompt.length > context_tokens * token_chars:
        raise errors.too_long(f"{prompt.length // token_chars} > {context_tokens}; shorten the prompt")
    spread, layouts = call.is_long and not call.zero_retention, await _lay_out_images(call, prompt)
    return EncodedPrompt(await call.compute(lambda: _encode(model, prompt, layouts, known, spread=spread)), layouts)


async def _lay_out_images(call: InferenceCall, prompt: Prompt) -> list[PictureLayout]:
    vision = require_vision(call.model.vision, prompt.images, call.model.name)
    if vision is None:
        return []
    async with _images_turn(call):
        return await lay_out(call.context.images, prompt.images, vision)


async def decode_prompt_images(call: InferenceCall, prompt: Prompt, encoded: EncodedPrompt) -> list[ImageInput]:
    """The prompt's images as a replica takes them. Raises ApiError for those that are not taken."""
    vision = call.model.vision
    if vision is None or not prompt.images:
        return []
    async with _images_turn(call):
        return await decode_images(call.context.images, prompt.images, encoded.layouts, vision, encoded.ids)


def _images_turn(call: InferenceCall) -> asyncio.Lock:
    """Held while images are looked into, of one call of an account after the other, so that none has all processes."""
    return call.context.account_locks.lock(f"images {call.caller.account.id}")


def _known_encodings(call: InferenceCall, prompt: Prompt) -> ScopedEncodings | None:
    """The encodings that the call may find and add to: those of the scope in which it shares cached prefixes, where it
    shares any. Zero retention has none."""
    encodings, account = call.context.encodings, call.caller.account
    scope = scope_of(call.caller, prompt.user, call.zero_retention)
    if call.zero_retention or scope.kind is ScopeKind.REQUEST:
        encodings.reach_epoch(account.id, account.epoch)
        return None
    return encodings.of_scope(account.id, scope.id, account.epoch, cache_retention_s(account.settings))


def _encode(
    model: Model,
    prompt: Prompt,
    layouts: Sequence[PictureLayout],
    known: ScopedEncodings | None,
    *,
    spread: bool = False,
) -> list[int]:
    """`spread`: by several threads."""
    text = model.tokenizer
    if prompt.ids is not None:
        return prompt.ids
    options = _template_options(model, prompt)
    try:
        if prompt.messages is not None:
            if prompt.tools and not text.supports_tools:
                raise errors.bad_input(f"'tools' are not known to {model.name}; leave them out", "tools")
            vision = model.vision if layouts else None
            images = None if vision is None else (vision.marker, vision.expansion)
            ids = text.encode_chat(
                prompt.messages, prompt.tools, options=options, spread=spread, known=known, images=images
            )
            return ids if vision is None else with_images(ids, prompt.images, layouts, vision)
        assert prompt.text is not None
        if prompt.raw or not text.has_chat_template:
            return text.encode_prompt(prompt.text)
        return text.encode_chat([{"role": "user", "content": prompt.text}], options=options, known=known)
    except TokenizationError as error:
        field = prompt.field_name("prompt" if prompt.messages is None else "messages")
        raise errors.bad_input(str(error), field) from None


def _template_options(model: Model, prompt: Prompt) -> dict[str, Any]:
    """Raises ApiError for options that the chat template does not know. A model without thinking has none to turn off,
    so that turning it off changes nothing there."""
    known = frozenset() if prompt.raw else model.tokenizer.template_options
    options: dict[str, Any] = {}
    for name, value in prompt.template_options.items():
        if name in known:
            options[name] = value
        elif (name, value) not in (("reasoning_effort", "none"), ("enable_thinking", False)):
            field = prompt.field_name(name if name == "reasoning_effort" else f"chat_template_kwargs.{name}")
            names = ", ".join(sorted(known)) or "none"
            raise errors.bad_input(f"'{field}' is not known to the template of {model.name}, which has {names}", field)
    return options


def check_prompt_fits(context: InferenceContext, model: Model, prompt: Prompt, prompt_tokens: int) -> int:
    """How many tokens fit behind the prompt. Raises ApiError for what only the model's sizes forbid."""
    context_tokens = context.fleet.context_tokens(model.name, model.context_tokens)
    hello = context.fleet.hello(model.name)
    vocabulary = model.vocabulary if hello is None else hello.vocabulary
    if prompt_tokens >= context_tokens:
        raise errors.too_long(f"{prompt_tokens} > {context_tokens}; shorten the prompt")
    if not prompt_tokens:
        raise errors.bad_input("the prompt is empty; send some text", "prompt")
    if prompt.ids is not None and max(prompt.ids) >= vocabulary:
        raise errors.bad_input(f"'prompt': ids of tokens are below {vocabulary}; send smaller ones", "prompt")
    over = [id for id in prompt.sampling.logit_bias if id >= vocabulary]
    if over:
        raise errors.bad_input(f"'logit_bias': {over[0]} is no token id; the vocabulary has {vocabulary}", "logit_bias")
    asked = prompt.max_tokens or model.settings.default_tokens
    if prompt.sampling.min_tokens > asked:
        limit = prompt.field_name("max_tokens")
        raise errors.bad_input(f"'min_tokens' is more than '{limit}', which is {asked}; raise that", "min_tokens")
    return context_tokens - prompt_tokens


def opens_in_reasoning(model: Model, prompt: Prompt, ids: list[int]) -> bool:
    """Whether the prompt ends within a thought, which the answer then goes on with."""
    if not reasoning_enabled(model, prompt):
        return False
    return opens_reasoning(model.tokenizer.detokenizer(shown=MARKERS).push(ids[-REASONING_TAIL_TOKENS:]))


def grammar_with_reasoning(model: Model, prompt: Prompt, opened: bool) -> Grammar | None:
    """What the answer is held to; a thought before it is free. Raises ApiError."""
    grammar = answer_grammar(prompt, model.tool_format, model.name)
    for field in ("min_tokens", "ignore_eos"):
        if grammar is not None and getattr(prompt.sampling, field):
            says = "does not go with an answer that is held to a form, or must call a tool: these say when it ends"
            raise errors.bad_input(f"'{field}' {says}; leave it out", field)
    format = model.tool_format
    if grammar is not None and format is not None and format.hold is not None and not (prompt.raw or prompt.ids):
        calls = bool(prompt.tools) and grammar.kind is GrammarKind.LARK
        return format.hold(grammar, model.tokenizer.added_tokens, calls)
    if grammar is None or not reasoning_enabled(model, prompt):
        return grammar
    return grammar_after_reasoning(grammar, model.tokenizer.added_tokens, opened)
