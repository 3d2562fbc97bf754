"""One completion as it is received: tokens to text, text to the parts that a dialect shows.

It does not know dialects, accounts or replicas.
"""

import secrets
from array import array
from dataclasses import dataclass, field
from typing import Final

from engine.protocol.frames import TokenLogprobs
from engine.protocol.types import FinishReason
from gateway import errors
from gateway.catalogue.catalogue import Model
from gateway.cluster.stream import OutputDelta
from gateway.http.json_body import is_json
from gateway.inference.prompt import Prompt
from gateway.inference.reply import Completion, Reply, ScoredToken, ToolUse
from gateway.text.detokenizer import Detokenizer
from gateway.text.tokenizer import ModelTokenizer
from gateway.tool_parsers.parts import (
    OutputParser,
    OutputPart,
    PlainTextParser,
    ReasoningPart,
    TextPart,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)
from gateway.tool_parsers.reasoning import MARKERS, ReasoningParser

LOGPROB_MIN: Final = -9999.0  # JSON has no infinity


@dataclass(slots=True)
class _Call:
    """A tool call in the making; it is `whole` once its end came."""

    name: str
    whole: bool = False
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")
    fragments: list[str] = field(default_factory=list)

    @property
    def begun(self) -> ToolUse:
        return ToolUse(self.id, self.name, "")

    @property
    def use(self) -> ToolUse:
        return ToolUse(self.id, self.name, "".join(self.fragments))


class CompletionBuilder:
    """One choice of a request. Once `last`, its last step, came, `finish` tells why it ended, as in Reply.finish.

    `tokens` are all that came, so that another replica can go on with it. `thought_tokens` counts up to the last piece
    of a thought, whose step may hold some of the text too."""

    __slots__ = (
        *("_calls", "_decoder", "_parser", "_pieces", "_scored", "_scores", "_call_index", "_text", "_thoughts"),
        *("_parallel", "finish", "last", "thought_tokens", "tokens"),
    )

    def __init__(self, model: Model, prompt: Prompt, opened: bool) -> None:
        """`opened`: the prompt ends within a thought."""
        self._text = model.tokenizer
        self._parser, markers = _parser(model, prompt, opened)
        self._decoder: Detokenizer = model.tokenizer.detokenizer(prompt.stop, markers, prompt.sampling.min_tokens)
        self._pieces: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[_Call] = []
        self._parallel = prompt.parallel_calls
        self._call_index = -1  # the number of the call that was rendered last
        self._scores = prompt.sampling.logprobs is not None
        self._scored: list[ScoredToken] = []
        self.finish: str | None = None
        self.last: OutputDelta | None = None
        self.tokens = array("I")
        self.thought_tokens = 0

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended it."""
        return self._decoder.stopped_by

    @property
    def text(self) -> str:
        """The text so far, without thoughts and calls."""
        return "".join(self._pieces)

    def push(self, step: OutputDelta) -> list[OutputPart]:
        """The parts that may be shown after this step. Sets `finish` with the last step."""
        self.tokens.extend(step.tokens)
        text = self._decoder.push(self._visible(step))
        if self._decoder.stopped_by is not None:
            self.finish = "stop"
        elif step.finish is not None:
            text += self._decoder.finish()
            self.finish = "length" if step.finish.reason is FinishReason.LENGTH else "stop"
        if self.finish is not None:
            self.last = step
        if self._parser is None:
            if not text:
                return []
            self._pieces.append(text)
            return [TextPart(text)]
        return self._parse(text, step)

    def logprobs_of(self, step: OutputDelta) -> list[ScoredToken]:
        """The step's log probabilities, without that of a stop token."""
        pairs = zip(self._visible(step), step.logprobs, strict=False)
        scored = [_scored(self._text, token, scored) for token, scored in pairs]
        if self._scores:
            self._scored += scored
        return scored

    def render(self, reply: Reply, index: int, parts: list[OutputPart], scored: list[ScoredToken]) -> bytes:
        """The parts as a dialect's events. Log probabilities go with the first text, or with an empty one."""
        if len(parts) == 1:  # as nearly always
            part = parts[0]
            if type(part) is TextPart:
                return reply.text(index, part.text, scored)
            if type(part) is ToolCallDelta and not scored:
                return reply.arguments(index, self._call_index, part.fragment)
        if scored and not any(type(part) is TextPart for part in parts):
            parts = [TextPart(""), *parts]
        events = []
        for part in parts:  # comparing types takes a fifth of what patterns take
            if type(part) is TextPart:
                events.append(reply.text(index, part.text, scored))
                scored = []
            elif type(part) is ToolCallDelta:
                events.append(reply.arguments(index, self._call_index, part.fragment))
            elif type(part) is ReasoningPart:
                events.append(reply.thought(index, part.text))
            elif type(part) is ToolCallStart:
                self._call_index += 1
                events.append(reply.call(index, self._call_index, self._calls[self._call_index].begun))
            else:
                events.append(reply.called(index, self._call_index, self._calls[self._call_index].use))
        return b"".join(events)

    def completion(self) -> Completion:
        assert self.finish is not None
        return Completion(
            text=self.text,
            finish=self.finish,
            tool_uses=[call.use for call in self._calls],
            logprobs=self._scored if self._scores else None,
            thought="".join(self._thoughts),
            stopped_by=self.stopped_by,
        )

    def _parse(self, text: str, step: OutputDelta) -> list[OutputPart]:
        assert self._parser is not None
        parts = self._parser.push(text)
        if self.finish is not None:
            parts += self._parser.finish()
        elif len(parts) == 1:  # as nearly always
            part = parts[0]
            if type(part) is TextPart:
                self._pieces.append(part.text)
                return parts
            if type(part) is ToolCallDelta:
                self._calls[-1].fragments.append(part.fragment)
                return parts
        if not self._parallel:
            parts = self._first_call(parts, step)
        for part in parts:
            if type(part) is TextPart:
                self._pieces.append(part.text)
            elif type(part) is ToolCallDelta:
                self._calls[-1].fragments.append(part.fragment)
            elif type(part) is ReasoningPart:
                self._thoughts.append(part.text)
                self.thought_tokens = len(self.tokens)
            elif type(part) is ToolCallStart:
                self._calls.append(_Call(part.name))
            else:
                self._calls[-1].whole = True
        if self.finish == "stop" and self._calls and self._calls[-1].whole:  # a call that was cut is none to answer
            self.finish = "tool_calls"
        return parts

    def _first_call(self, parts: list[OutputPart], step: OutputDelta) -> list[OutputPart]:
        """The parts up to the end of the first call, which ends an answer that may hold only one."""
        end = next((i for i, part in enumerate(parts) if type(part) is ToolCallEnd), None)
        if end is None:
            return parts
        self.finish, self.last = "tool_calls", step
        return parts[: end + 1]

    def _visible(self, step: OutputDelta) -> list[int]:
        """The step's tokens without the stop token that ended it."""
        tokens = step.tokens
        stopped = step.finish is not None and step.finish.reason is FinishReason.STOP
        return tokens[:-1] if stopped and tokens and tokens[-1] in self._text.stop_ids else tokens


def reasoning_enabled(model: Model, prompt: Prompt) -> bool:
    """Whether the answer may begin with a thought, as it does unless it continues a raw text."""
    return model.has_reasoning and _is_chat(prompt)


def _is_chat(prompt: Prompt) -> bool:
    return prompt.ids is None and not prompt.raw


def check_grammar_met(choice: CompletionBuilder, prompt: Prompt) -> None:
    """Raises ApiError where an ended choice is not what the prompt's grammar wants: a part is never sent as a whole.

    The replica holds the answer to the grammar until something cuts it, which the finish reason says, unless the prompt
    asks for `whole_only`; that a document is one is checked again here.
    """
    if not prompt.whole_only and (choice.finish in ("length", "quota") or choice.stopped_by is not None):
        return
    limit, stop = prompt.field_name("max_tokens"), prompt.field_name("stop")
    if choice.finish == "length":
        raise errors.grammar_not_met(f"the answer was not whole within its tokens; raise '{limit}'", limit)
    if choice.finish == "quota":
        raise errors.grammar_not_met("a limit of neurons ended the answer; ask again when it has more", limit)
    if choice.stopped_by is not None:
        raise errors.grammar_not_met(f"a stop string ended the answer; leave '{stop}' out", stop)
    if prompt.json and choice.finish != "tool_calls" and not is_json(choice.text):
        raise errors.grammar_not_met("the answer is no JSON document; ask again", prompt.grammar_field)


def _parser(model: Model, prompt: Prompt, opened: bool) -> tuple[OutputParser | None, frozenset[str]]:
    """The parser of the parts, and the control tokens that it must see; None where all is text."""
    parser, markers = None, frozenset[str]()
    format = model.tool_format
    if format is not None and (prompt.tools or (format.hold is not None and _is_chat(prompt))):
        parser, markers = format.parser(prompt.tools or [], prompt.tool_choice), format.markers
    if reasoning_enabled(model, prompt):
        return ReasoningParser(parser or PlainTextParser(), opened), markers | MARKERS
    return parser, markers


def _scored(text: ModelTokenizer, token: int, scored: TokenLogprobs) -> ScoredToken:
    top = zip(scored.top_ids, scored.top_logprobs, strict=True)
    return _chosen(text, token, scored.logprob, [_chosen(text, id, logprob, []) for id, logprob in top])


def _chosen(text: ModelTokenizer, token: int, logprob: float, top: list[ScoredToken]) -> ScoredToken:
    raw = text.token_bytes(token)
    return ScoredToken(raw.decode("utf-8", "replace"), raw, max(logprob, LOGPROB_MIN), top)
