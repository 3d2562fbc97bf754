"""OpenAI's legacy dialect: a text to go on with, and a completion to `text_completion` or its chunks.

It does not know accounts, replicas or sockets.
"""

from collections.abc import Iterator
from functools import partial
from itertools import accumulate
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from gateway.api.body_fields import (
    CHOICES_MAX,
    Probability,
    SamplingFields,
    ShortText,
    StreamOptions,
    TokenId,
    prompt_sampling,
    prompt_stream,
    refuse_field,
)
from gateway.api.chunks import ChunkWriter
from gateway.api.dialect import GenerationRequest
from gateway.errors import bad_input
from gateway.http.json_body import decode_body
from gateway.inference.prompt import Prompt
from gateway.inference.reply import Completion, RunningUsage, ScoredToken, ToolUse, Usage

MAX_TOKENS_DEFAULT: Final = 16
LOGPROBS_MAX: Final = 5
_encode = msgspec.json.encode

Tokens = Annotated[list[TokenId], Meta(min_length=1)]


class CompletionsBody(SamplingFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every field of completions. One request has one prompt: a text or tokens, alone or in a list of one."""

    model: ShortText
    prompt: str | list[str | TokenId | Tokens]
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Probability | None = None
    n: Annotated[int, Meta(ge=1, le=CHOICES_MAX)] | None = None
    best_of: Annotated[int, Meta(ge=1, le=CHOICES_MAX)] | None = None
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    logprobs: Annotated[int, Meta(ge=0, le=LOGPROBS_MAX)] | None = None
    echo: bool | None = None
    suffix: str | None = None


_decoder: Final = msgspec.json.Decoder(CompletionsBody)


def completions_prompt(body: CompletionsBody, drawn_seed: int) -> Prompt:
    """What a completion asks for. Raises ApiError."""
    refuse_field("suffix", body.suffix or None, "put what is before it into 'prompt', and leave it out")
    stream = prompt_stream(body.stream, body.stream_options)
    text, ids = _single_prompt(body.prompt)
    n = body.n or 1
    drawn = _drawn_choices(body, n)
    if body.echo and (ids is not None or body.logprobs is not None):
        raise bad_input("'echo' goes with a text for 'prompt' and without 'logprobs'; leave it out", "echo")
    return Prompt(
        text=text,
        ids=ids,
        raw=True,
        max_tokens=body.max_tokens or MAX_TOKENS_DEFAULT,
        n=drawn,
        **stream,
        **prompt_sampling(
            body,
            drawn_seed,
            temperature=body.temperature,
            top_p=body.top_p,
            seed=body.seed,
            logprobs=0 if body.logprobs is None and drawn > n else body.logprobs,
        ),
    )


def _drawn_choices(body: CompletionsBody, n: int) -> int:
    """How many choices are drawn; the best n of them are shown."""
    drawn = body.best_of or n
    if drawn < n:
        raise bad_input(f"'best_of' is at least 'n', which is {n}", "best_of")
    if drawn > n and body.stream:
        raise bad_input("'best_of' above 'n' is known at the end only and cannot be streamed; leave it out", "best_of")
    return drawn


def _single_prompt(prompt: str | list[str | int | list[int]]) -> tuple[str | None, list[int] | None]:
    """The one prompt, as a text or as tokens. Raises ApiError for none, and for several."""
    item = prompt[0] if isinstance(prompt, list) and len(prompt) == 1 else prompt
    if isinstance(item, str):
        return item, None
    ids = [id for id in ([item] if isinstance(item, int) else item) if isinstance(id, int)]
    if not ids or (isinstance(item, list) and len(ids) < len(item)):
        raise bad_input("'prompt' holds no prompt, or several; send one text, or its tokens, a request", "prompt")
    return None, ids


class CompletionsReply:
    """`text_completion`, or chunks of it. `shown` choices, with their log probabilities where `scored`, and behind the
    prompt's own text where that is to be echoed."""

    def __init__(
        self,
        prompt: Prompt,
        model: str,
        id: str,
        created: int,
        paddings: Iterator[bytes],
        *,
        shown: int,
        scored: bool,
        echo: str = "",
        enveloped: bool = False,
    ) -> None:
        kinds = "text_completion", "text_completion"
        chunks = ChunkWriter(prompt, kinds, f"cmpl-{id}", created, model, paddings, enveloped=enveloped)
        self._chunks = chunks
        self.end, self.fail = chunks.end, chunks.fail
        self._shown = shown
        self._scored = scored
        self._echo = echo
        self._offsets = [0] * prompt.n

    def begin(self, running: RunningUsage) -> bytes:
        with self._chunks.beginning(running):
            return b"".join(self.text(choice, self._echo, []) for choice in range(self._shown) if self._echo)

    def text(self, choice: int, text: str, logprobs: list[ScoredToken]) -> bytes:
        scored = _scored(logprobs, self._offsets[choice]) if logprobs else None
        self._offsets[choice] += len(text)
        return self._event(choice, text, scored, None)

    def thought(self, choice: int, text: str) -> bytes:
        return self.text(choice, text, [])

    def call(self, choice: int, number: int, use: ToolUse) -> bytes:
        return b""

    def arguments(self, choice: int, number: int, fragment: str) -> bytes:
        return b""

    def called(self, choice: int, number: int, use: ToolUse) -> bytes:
        return b""

    def finish(self, choice: int, reason: str, stopped_by: str | None) -> bytes:
        return self._event(choice, "", None, reason)

    def whole(self, completions: list[Completion], usage: Usage) -> bytes:
        if self._shown < len(completions):
            completions = sorted(completions, key=_likelihood, reverse=True)[: self._shown]
        return self._chunks.body([self._choice(i, completion) for i, completion in enumerate(completions)], usage)

    def _choice(self, index: int, completion: Completion) -> dict[str, Any]:
        scored = _scored(completion.logprobs or [], 0) if self._scored else None
        text = self._echo + completion.thought + completion.text
        return {"index": index, "text": text, "logprobs": scored, "finish_reason": completion.finish}

    def _event(self, choice: int, text: str, scored: dict[str, Any] | None, finish: str | None) -> bytes:
        chunk = {"index": choice, "text": text, "logprobs": scored, "finish_reason": finish}
        return self._chunks.event(_encode(chunk))


def _likelihood(completion: Completion) -> float:
    """The mean log probability of its tokens."""
    scored = completion.logprobs or []
    return sum(token.logprob for token in scored) / len(scored) if scored else 0.0


def _scored(chosen: list[ScoredToken], offset: int) -> dict[str, Any]:
    """Columns, one entry for each token; `offset` is where the first stands in the text."""
    tokens = [scored.token for scored in chosen]
    top = None
    if any(scored.top for scored in chosen):
        top = [
            {**{other.token: other.logprob for other in scored.top}, scored.token: scored.logprob} for scored in chosen
        ]
    return {
        "tokens": tokens,
        "token_logprobs": [scored.logprob for scored in chosen],
        "top_logprobs": top,
        "text_offset": list(accumulate(map(len, tokens), initial=offset))[:-1],
    }


def read_completions(body: bytes, query: bytes, model: str | None, drawn_seed: int) -> GenerationRequest:
    """The dialect of `/v1/completions`."""
    assert model is None, "the body names the model"
    request = decode_body(body, _decoder)
    prompt = completions_prompt(request, drawn_seed)
    echo = prompt.text or "" if request.echo else ""
    scored = request.logprobs is not None
    reply = partial(CompletionsReply, prompt, shown=request.n or 1, scored=scored, echo=echo)
    return GenerationRequest(request.model, prompt, reply)
