"""A call for text, top to bottom: encode, check, reserve, run on a replica, answer. It does not know JSON fields,
sockets, stores or how a replica is chosen.
"""

import asyncio
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

import msgspec

from engine.protocol.frames import Submit
from engine.protocol.types import FinishReason, GivenTokens, Grammar, RejectReason
from gateway import errors
from gateway.cluster.stream import (
    OutputDelta,
    ReplicaLeaving,
    ReplicaLost,
    ReplicaMoved,
    ReplicaRejected,
    ReplicaStream,
    ReplicaSucceeded,
    SuccessorWanted,
    pack_token_ids,
)
from gateway.images.placing import pack_prompt
from gateway.inference.cache_scope import scope_of, terms_of
from gateway.inference.completion import CompletionBuilder, check_grammar_met
from gateway.inference.grammar import grammar_error
from gateway.inference.lifecycle import InferenceCall, Work
from gateway.inference.prompt import Prompt
from gateway.inference.prompt_encoding import (
    check_prompt_fits,
    decode_prompt_images,
    encode_prompt,
    grammar_with_reasoning,
    opens_in_reasoning,
)
from gateway.inference.replica_wait import error_of_rejection, submit, submit_beside
from gateway.inference.reply import Reply, RunningUsage, ScoredToken, Usage
from gateway.tool_parsers.parts import OutputPart
from tenants.limits.reservation import CallUsage

BUSY_PAUSE_S: Final = 0.25  # before a replica without a place is asked again to go on with what another one began


class TextGeneration(Work):
    """The work of a call for text: `n` completions of one prompt, from one stream of one replica."""

    def __init__(self, prompt: Prompt, reply: Reply) -> None:
        self.prompt = prompt
        self.reply = reply
        self.stream: ReplicaStream | None = None
        self.choices: list[CompletionBuilder] = []  # once the prompt is encoded
        self._known: dict[int, array[int]] = {}  # by choice, what another stream gave that this one gives again
        self.grammar: Grammar | None = None  # what a replica holds the answer to
        self.unfinished = prompt.n
        self.running = RunningUsage()
        self.computed = False  # a replica has begun with the prompt
        self.first_token_at: float | None = None
        self._replica_first_s: float | None = None  # of it, from the submission to its arrival here
        self._began_as: str | None = None  # the model of the replica that gave the first token
        self.cut_by_quota = False  # a limit of neurons lets it generate less than it asked for

    async def run(self, call: InferenceCall) -> None:
        """Everything between the checked prompt and the last byte of the answer."""
        model, prompt = call.model, self.prompt
        encoded = await encode_prompt(call, prompt)
        ids = encoded.ids
        room = check_prompt_fits(call.context, model, prompt, len(ids))
        opened = opens_in_reasoning(model, prompt, ids)
        self.grammar = grammar_with_reasoning(model, prompt, opened)
        tokens = pack_token_ids(ids)
        self.running.prompt_tokens = len(ids)
        self.choices = [CompletionBuilder(model, prompt, opened) for _ in range(prompt.n)]
        fingerprint = call.fingerprint(tokens)
        max_tokens = min(prompt.max_tokens or model.settings.default_tokens, room)
        reservation = await call.reserve(len(ids), max_tokens * prompt.n, prompt.n)
        affordable = reservation.output_tokens // prompt.n
        self.cut_by_quota = affordable < max_tokens
        images = await decode_prompt_images(call, prompt, encoded)
        if prompt.stream:
            call.exchange.stream(self.reply.fail)
        order = Submit(
            id=0,
            tokens=pack_prompt(ids, images, model.vision),
            scope=scope_of(call.caller, prompt.user, call.zero_retention),
            sampling=prompt.sampling_of(model.sampling),
            max_tokens=min(max_tokens, affordable),
            stop_ids=model.tokenizer.stop_ids,
            n=prompt.n,
            traceparent=call.span.traceparent,
            terms=terms_of(call.caller, call.zero_retention, background=call.options.background),
            regions=list(call.regions),
            grammar=self.grammar,
            images=images,
        )
        sink: OutputSink = EventStreamSink(self, call) if prompt.stream else SingleBodySink(self, call)
        await self._run_on_replica(call, order, sink, fingerprint)
        await sink.end()

    async def _run_on_replica(self, call: InferenceCall, order: Submit, sink: "OutputSink", fingerprint: bytes) -> None:
        """Runs the order on a replica. Where that is lost, ends or falls asleep, another one goes on behind the last
        token that came, or the same once it is back: with seed and position the draws are the same anywhere."""
        moved: ReplicaMoved | None = None
        while True:
            place, moved = moved, None
            try:
                heir = self._take_heir()
                self.stream = heir or await submit(call, self._left_of(order, place), self._began_as, place)
                await self._read(call, order, self.stream, sink, fingerprint)
                return
            except (ReplicaLeaving, ReplicaSucceeded):
                self._forget_unseen()
            except ReplicaMoved as handed_over:
                moved = handed_over
            except ReplicaLost as lost:
                self._forget_unseen()
                await call.note_loss(lost.crashed, fingerprint)
            except ReplicaRejected as rejected:
                if rejected.reason is RejectReason.GRAMMAR:
                    raise grammar_error(self.prompt, self.grammar, rejected.message) from None
                if rejected.reason is RejectReason.IMAGES:
                    raise errors.bad_input(rejected.message, self.prompt.images[0].field) from None
                if rejected.reason is RejectReason.BUSY and self._began_as is not None:
                    await asyncio.sleep(BUSY_PAUSE_S)
                elif rejected.reason is not RejectReason.DRAINING:
                    raise error_of_rejection(call, rejected) from None

    async def _read(
        self, call: InferenceCall, order: Submit, stream: ReplicaStream, sink: "OutputSink", fingerprint: bytes
    ) -> None:
        """Reads a stream to the end of all choices, and begins heirs where it wants them."""
        while True:
            try:
                async for step in stream:
                    sink.push(self._without_known(step) if self._known else step)
                    if not stream.ready:
                        await sink.flush()
                    if not self.unfinished:
                        break
                stream.cancel()  # its heir
                return
            except SuccessorWanted as wanted:
                if wanted.lost is not None:
                    await call.note_loss(wanted.lost.crashed, fingerprint)
                stream.prepare(await submit_beside(call, self._left_of(order, None), stream))

    def _take_heir(self) -> ReplicaStream | None:
        """The heir of the last stream, if it has one, without the choices that ended meanwhile."""
        self._known = {}
        heir = None if self.stream is None else self.stream.take_heir()
        if heir is not None:
            for index in heir.choices:
                if self.choices[index].finish is not None:
                    heir.stop(index)
                elif known := self.choices[index].tokens[heir.given.get(index, 0) :]:
                    self._known[index] = known
        return heir

    def _without_known(self, step: OutputDelta) -> OutputDelta:
        """The step without tokens that came before from the stream whose heir gives them again. Raises ReplicaLeaving
        where they differ, as rounding may have it: another replica goes on with those that the client has."""
        known = self._known.pop(step.index_in_n, None)
        if known is None:
            return step
        count = min(len(known), len(step.tokens))
        ends_early = step.finish is not None and count < len(known)
        if ends_early or known[:count].tolist() != step.tokens[:count]:
            self.cancel()
            raise ReplicaLeaving
        if count < len(known):
            self._known[step.index_in_n] = known[count:]
        return msgspec.structs.replace(step, started=None, tokens=step.tokens[count:], logprobs=step.logprobs[count:])

    def _left_of(self, order: Submit, moved: ReplicaMoved | None) -> Submit:
        """The order without the choices that have ended, behind the tokens that came, and with the keys of KV that
        moved."""
        if self._began_as is None:
            return order
        choices = [(index, choice) for index, choice in enumerate(self.choices) if choice.finish is None]
        keys = {} if moved is None else moved.keys
        given = [GivenTokens(index, pack_token_ids(choice.tokens), keys.get(index, b"")) for index, choice in choices]
        return msgspec.structs.replace(order, n=len(given), given=given)

    def _forget_unseen(self) -> None:
        """Charges nothing for a replica of which no token came."""
        if self._began_as is None:
            self.computed, self.running.cached_tokens = False, 0

    def receive(
        self, choice: CompletionBuilder, step: OutputDelta, clock: Callable[[], float]
    ) -> tuple[list[OutputPart], list[ScoredToken]]:
        """Counts a step and decodes it: what may be shown of it, and its log probabilities. Raises ApiError when it
        failed, or when it ended before its text was what the prompt's grammar wants."""
        finish = step.finish
        if choice.finish is not None:  # it ended by a stop string: what was on its way then is nobody's
            return [], []
        if finish is not None and finish.reason in (FinishReason.ERROR, FinishReason.CANCELLED):
            raise errors.failed(finish.message)
        if step.started is not None:
            self.computed = True
            if step.index_in_n == 0 and self.stream is not None and not self.stream.resumed:
                self.running.cached_tokens = step.started.cached_tokens
        if step.tokens:
            self.computed = True
            self.running.completion_tokens += len(step.tokens)
            if self.first_token_at is None:
                self.first_token_at = clock()
                if self.stream is not None:
                    self._began_as, self._replica_first_s = self.stream.model, self.stream.first_token_s
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
            prompt_tokens=self.running.prompt_tokens,
            cut=any(choice.finish == "quota" for choice in self.choices),
            thought_tokens=sum(choice.thought_tokens for choice in self.choices),
        )

    def spent(self, began: float) -> CallUsage:
        first = self.first_token_at
        return CallUsage(
            prompt_tokens=self.running.prompt_tokens if self.computed else 0,
            cached_tokens=self.running.cached_tokens,
            completion_tokens=self.running.completion_tokens,
            first_token_ms=None if first is None else (first - began) * 1000,
        )

    def gateway_s(self, began: float) -> float | None:
        if self.first_token_at is None or self._replica_first_s is None:
            return None
        return max(0.0, self.first_token_at - began - self._replica_first_s)

    @property
    def queue_ms(self) -> float:
        started = None if self.stream is None else self.stream.started
        return 0.0 if started is None else started.waited_ms

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
        encoded = await encode_prompt(call, self.prompt)
        await call.answer(self.render(len(encoded.ids)))


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
            self._events.append(reply.begin(work.running))
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
