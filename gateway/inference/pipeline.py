"""A call for text, top to bottom: encode, check, reserve, run on a replica, answer. It does not know JSON fields,
sockets, stores or how a replica is chosen.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec

from engine.protocol.frames import Submit
from engine.protocol.types import FinishReason, Grammar, RejectReason
from gateway import errors
from gateway.cluster.client import pack_token_ids
from gateway.cluster.stream import OutputDelta, ReplicaAsleep, ReplicaLost, ReplicaRejected, ReplicaStream
from gateway.inference.cache_scope import scope_of, terms_of
from gateway.inference.completion import CompletionBuilder, check_grammar_met
from gateway.inference.grammar import grammar_error
from gateway.inference.lifecycle import InferenceCall, Work
from gateway.inference.prompt import Prompt
from gateway.inference.prompt_encoding import (
    check_prompt_fits,
    encode_prompt,
    grammar_with_reasoning,
    opens_in_reasoning,
)
from gateway.inference.replica_wait import TRIES_MAX, error_of_rejection, submit
from gateway.inference.reply import Reply, ScoredToken, Usage
from gateway.tool_parsers.parts import OutputPart
from tenants.limits.reservation import CallUsage


class TextGeneration(Work):
    """The work of a call for text: `n` completions of one prompt, from one stream of one replica."""

    def __init__(self, prompt: Prompt, reply: Reply) -> None:
        self.prompt = prompt
        self.reply = reply
        self.stream: ReplicaStream | None = None
        self.choices: list[CompletionBuilder] = []  # once the prompt is encoded
        self.grammar: Grammar | None = None  # what a replica holds the answer to
        self.unfinished = prompt.n
        self.prompt_tokens = 0
        self.computed = False  # a replica has begun with the prompt
        self.cached_tokens = 0
        self.completion_tokens = 0
        self.first_token_at: float | None = None
        self.cut_by_quota = False  # a limit of neurons lets it generate less than it asked for

    async def run(self, call: InferenceCall) -> None:
        """Everything between the checked prompt and the last byte of the answer."""
        model, prompt = call.model, self.prompt
        ids = await encode_prompt(call, prompt)
        room = check_prompt_fits(call.context, model, prompt, len(ids))
        opened = opens_in_reasoning(model, prompt, ids)
        self.grammar = grammar_with_reasoning(model, prompt, opened)
        tokens = pack_token_ids(ids)
        self.prompt_tokens = len(ids)
        self.choices = [CompletionBuilder(model, prompt, opened) for _ in range(prompt.n)]
        fingerprint = call.fingerprint(tokens)
        max_tokens = min(prompt.max_tokens or model.settings.default_tokens, room)
        reservation = await call.reserve(len(ids), max_tokens * prompt.n, prompt.n)
        affordable = reservation.output_tokens // prompt.n
        self.cut_by_quota = affordable < max_tokens
        if prompt.stream:
            call.exchange.stream(self.reply.fail)
        order = Submit(
            id=0,
            tokens=tokens,
            scope=scope_of(call.caller, prompt.user, call.zero_retention),
            sampling=prompt.sampling,
            max_tokens=min(max_tokens, affordable),
            stop_ids=model.tokenizer.stop_ids,
            n=prompt.n,
            traceparent=call.span.traceparent,
            terms=terms_of(call.caller, call.zero_retention, background=call.options.background),
            grammar=self.grammar,
        )
        sink: OutputSink = EventStreamSink(self, call) if prompt.stream else SingleBodySink(self, call)
        await self._run_on_replica(call, order, sink, fingerprint)
        await sink.end()

    async def _run_on_replica(self, call: InferenceCall, order: Submit, sink: "OutputSink", fingerprint: bytes) -> None:
        """Runs the order on a replica, and once more on another one where the first is lost before any token came. An
        order whose model goes to sleep before it has begun waits for the model again."""
        tries = 1
        while True:
            try:
                self.stream = stream = await submit(call, order)
                async for step in stream:
                    sink.push(step)
                    if not stream.ready:
                        await sink.flush()
                    if not self.unfinished:
                        break
                return
            except ReplicaAsleep:
                continue
            except ReplicaLost:
                call.context.crash_breaker.record_crash(fingerprint)
                if self.completion_tokens:
                    raise errors.replica_lost() from None
                self.computed, self.cached_tokens = False, 0  # nothing of it reached the client, or is charged
                if tries == TRIES_MAX:
                    raise errors.replica_lost() from None
            except ReplicaRejected as rejected:
                if tries == TRIES_MAX or rejected.reason is not RejectReason.DRAINING:
                    if rejected.reason is RejectReason.GRAMMAR:
                        raise grammar_error(self.prompt, self.grammar, rejected.message) from None
                    raise error_of_rejection(call, rejected) from None
            tries += 1

    def receive(
        self, choice: CompletionBuilder, step: OutputDelta, clock: Callable[[], float]
    ) -> tuple[list[OutputPart], list[ScoredToken]]:
        """Counts a step and decodes it: what may be shown of it, and its log probabilities. Raises ApiError when it
        failed, or when it ended before its text was what the prompt's grammar wants."""
        finish = step.finish
        if finish is not None and finish.reason in (FinishReason.ERROR, FinishReason.CANCELLED):
            raise errors.failed(finish.message)
        if choice.finish is not None:
            return [], []
        if step.started is not None:
            self.computed = True
            if step.index_in_n == 0:
                self.cached_tokens = step.started.cached_tokens
        if step.tokens:
            self.computed = True
            self.completion_tokens += len(step.tokens)
            if self.first_token_at is None:
                self.first_token_at = clock()
        if finish is not None and finish.reason is FinishReason.GRAMMAR:
            raise grammar_error(self.prompt, self.grammar, finish.message)
        parts = choice.push(step)
        if choice.finish is not None:
            self.unfinished -= 1
            if self.cut_by_quota and choice.finish == "length":
                choice.finish = "quota"
            if finish is None and self.stream is not None:
                self.stream.stop(step.index_in_n)
            if self.prompt.grammar is not None:
                check_grammar_met(choice, self.prompt)
        return parts, choice.logprobs_of(step) if step.logprobs else []

    def usage(self, call: InferenceCall) -> Usage:
        """What the answer says that the call cost."""
        return msgspec.structs.replace(
            call.usage(),
            prompt_tokens=self.prompt_tokens,
            cut=any(choice.finish == "quota" for choice in self.choices),
            thought_tokens=sum(choice.thought_tokens for choice in self.choices),
        )

    def spent(self, began: float) -> CallUsage:
        first = self.first_token_at
        return CallUsage(
            prompt_tokens=self.prompt_tokens if self.computed else 0,
            cached_tokens=self.cached_tokens,
            completion_tokens=self.completion_tokens,
            first_token_ms=None if first is None else (first - began) * 1000,
        )

    def gateway_s(self, began: float) -> float | None:
        if self.first_token_at is None or self.stream is None or self.stream.first_token_s is None:
            return None
        return max(0.0, self.first_token_at - began - self.stream.first_token_s)

    def cancel(self) -> None:
        if self.stream is not None:
            self.stream.cancel()


@dataclass(frozen=True)
class TokenCount(Work):
    """The work of a call that only asks how many tokens a prompt has. It is one request for the limits and costs no
    tokens. `render` makes the body of the answer."""

    prompt: Prompt
    render: Callable[[int], bytes]

    async def run(self, call: InferenceCall) -> None:
        await call.reserve(0)
        ids = await encode_prompt(call, self.prompt)
        await call.answer(self.render(len(ids)))


class OutputSink(Protocol):
    """Where steps go: into events, or into one body."""

    def push(self, step: OutputDelta) -> None: ...

    async def flush(self) -> None:
        """Sends what was pushed, if it is sent before the end at all."""
        ...

    async def end(self) -> None: ...


class EventStreamSink:
    """The streamed answer: all steps that came since the last write leave as events in one write."""

    def __init__(self, work: TextGeneration, call: InferenceCall) -> None:
        self._work = work
        self._call = call
        self._reply = work.reply
        self._clock = call.context.clock
        self._begun = False
        self._events: list[bytes] = []

    def push(self, step: OutputDelta) -> None:
        work, reply, index = self._work, self._reply, step.index_in_n
        choice = work.choices[index]
        parts, scored = work.receive(choice, step, self._clock)
        if not self._begun:
            self._begun = True
            self._events.append(reply.begin(work.prompt_tokens, work.cached_tokens))
        if parts or scored:
            self._events.append(choice.render(reply, index, parts, scored))
        if choice.finish is not None and step is choice.last:
            self._events.append(reply.finish(index, choice.finish, choice.stopped_by))

    async def flush(self) -> None:
        if self._events:
            events, self._events = b"".join(self._events), []
            await self._call.exchange.write(events)
            self._call.checkpoint()

    async def end(self) -> None:
        events = b"".join(self._events)
        await self._call.exchange.end(events + self._reply.end(self._work.usage(self._call)))


class SingleBodySink:
    """The answer in one piece."""

    def __init__(self, work: TextGeneration, call: InferenceCall) -> None:
        self._work = work
        self._call = call
        self._clock = call.context.clock

    def push(self, step: OutputDelta) -> None:
        self._work.receive(self._work.choices[step.index_in_n], step, self._clock)

    async def flush(self) -> None:
        self._call.checkpoint()

    async def end(self) -> None:
        usage = self._work.usage(self._call)
        completions = [choice.completion() for choice in self._work.choices]
        await self._call.answer(self._work.reply.whole(completions, usage), usage)
