"""The stamp engine: a runner without a model, whose KV slots say who wrote them, for which position and token.

What attention would read is checked slot by slot, in each group what its span shows, and the next token is a digest of
the tokens that were READ, so that a wrong block, a stale slot or a foreign prefix shows as a failed assertion or as
another text. `solo` computes the same text from the true tokens alone. Run as a file it is a replica process that needs
no torch:

    python tests/support/stamp_engine.py '<ReplicaSpec JSON>' '<Temper JSON>'
"""

import math
import sys
import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import pairwise

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.log import log
from engine.protocol.reports import MemoryReport
from engine.protocol.specs import ReplicaSpec
from engine.protocol.types import SamplingParams
from engine.step.exchange import Gathered
from engine.step.executor import InflightStep, LoadedModel, MemoryUsage, PagedLayout, RunnerOutput
from engine.step.key_span import FULL, KeySpan
from engine.step.layout import Int32s, StepBatch, unpack_step
from engine.step.limits import ExecutorLimits, check_step

PUBLIC = -7  # the scope of what is published
NOT_FINITE = -(1 << 40)  # as a token that is read
_RUBBISH = -3  # as a position
_BLANK = (-1, -1, -1, -1, True, False)  # of Stamps.stamps
_SLOT_BYTES = 16
_STEP = np.uint64(0x9E3779B97F4A7C15)
_MASK = (1 << 64) - 1
_POWERS = np.cumprod(np.full(1 << 14, 0xD1342543DE82EF95, np.uint64), dtype=np.uint64)


Reading = list[tuple[int, NDArray[np.int64]]]
"""For each group the first position that a slice reads, and the tokens from there on."""


@dataclass(frozen=True, slots=True)
class Claim:
    """Who a slice belongs to: a number per scope, one per sequence, and whether it may read others of its scope.

    Its first `public` blocks are of scope PUBLIC, which everybody may read and nobody here may write. What a secret one
    writes has to be erased before anybody else has the block, as others of its scope have it that share.

    A lost slice builds on a step that was launched and never done: whatever it reads and gives is rubbish.
    """

    scope: int
    sequence: int
    shares: bool
    lost: bool = False
    public: int = 0
    secret: bool = False


def _of_groups(batch: StepBatch, count: int) -> StepBatch:
    """The step as its first groups see it: blocks of others, if there are any, lie elsewhere."""
    return replace(
        batch,
        tables_GSW=batch.tables_GSW[:count],
        slots_GT=batch.slots_GT[:count],
        table_starts_GS=batch.table_starts_GS[:count],
        own_starts_GS=batch.own_starts_GS[:count],
    )


class IllegalRead(AssertionError):
    """Attention would have read a slot that does not hold what the sequence believes."""


class StampFlight:
    """`lacking` is what it samples from, while it has no masks."""

    def __init__(self, sampled: RunnerOutput | None, lacking: "tuple[StepBatch, list[Reading | None]] | None") -> None:
        self.sampled = sampled
        self.lacking = lacking

    def wait(self) -> RunnerOutput:
        assert self.sampled is not None, "masked rows without their masks"
        return self.sampled


class Stamps:
    """A model without a device, in all of its parts: executor, sampler, paged memory and sleeper. Set `claims` before a
    launch, one per slice, to have ownership checked too.

    Blocks have memory by extents, and asleep none has any: what is read, written, copied or kept without it is found
    out, and so is a secret that loses its memory before it is erased, or is kept.

    It computes while it launches, but does not say what before it is asked: tokens of −1−r are its own to look up. Set
    `glitch` to have one row write what is not finite: whoever reads that samples −1.
    """

    revision = "stamp-1"
    costs = None

    def __init__(
        self,
        blocks: int,
        block_tokens: int,
        context_tokens: int = 4096,
        vocabulary: int = 1000,
        stop_ids: Items[int] = (),
        extent_blocks: int | None = None,
        mapped: Items[int] | None = None,
        depth: int = 1,
        sequences: int = 64,
        spans: tuple[KeySpan, ...] = (FULL,),
    ) -> None:
        """None: there is one extent; all of them are mapped. A group for each span; all name blocks of one pool, which
        has room for each of them in every block."""
        self.blocks = blocks
        self.extent_blocks = extent_blocks or blocks
        self.extents = -(-blocks // self.extent_blocks)
        self.block_tokens = block_tokens
        self.spans = spans
        self.limits = ExecutorLimits(
            context_tokens, vocabulary, (blocks,) * len(spans), 512, 512, sequences, depth, adapters=2
        )
        min_extents = min(-(-context_tokens // block_tokens // self.extent_blocks), self.extents)
        self.layout = PagedLayout(
            "stamps", blocks, block_tokens, block_tokens * _SLOT_BYTES, self.extent_blocks, min_extents
        )
        self.vocabulary = vocabulary
        self.stop_ids = list(stop_ids)
        self.kv_bytes = blocks * block_tokens * _SLOT_BYTES
        self.claims: list[Claim] | None = None
        self.glitch: int | None = None
        self.sampled_R: Int32s = np.empty(0, np.int32)  # of the last launch
        slots = blocks * block_tokens
        shape = (len(spans), slots)
        self.scope_GK, self.sequence_GK, self.position_GK, self.token_GK = np.full((4, *shape), -1, np.int64)
        self.finite_GK = np.ones(shape, np.bool_)
        self.secret_GK = np.zeros(shape, np.bool_)  # what may not be there when somebody else has the block
        self.stamps = (
            *(self.scope_GK, self.sequence_GK, self.position_GK, self.token_GK),
            *(self.finite_GK, self.secret_GK),
        )
        self.zeroed = 0
        self.there_E = np.zeros(self.extents, np.bool_)
        self.there_E[list(range(self.extents) if mapped is None else mapped)] = True
        self.kept: tuple[list[int], list[NDArray[np.generic]]] | None = None  # asleep: blocks and their stamps

    def loaded(self) -> LoadedModel:
        resources = ExitStack()
        resources.callback(self.close)
        report = MemoryReport(
            model="stamps", pid=0, device="none", device_bytes=0, weights_bytes=0, kv_blocks=self.blocks,
            kv_block_tokens=self.block_tokens, kv_bytes=self.kv_bytes, free_bytes=0,
        )  # fmt: skip
        stops = frozenset(self.stop_ids)
        return LoadedModel(
            self.revision, stops, frozenset(), self, self, (self,), self, report, resources,
            exchange=self if len(self.spans) == 1 else None,
        )  # fmt: skip

    def warm_up(self) -> bool:
        return False

    def launch(self, packed: Int32s) -> StampFlight:
        batch = _of_groups(unpack_step(packed.copy()), self.limits.groups)
        check_step(batch, self.limits)
        for tokens in (batch.tokens_T, batch.history_H):
            unknown = tokens < 0
            assert (tokens >= -len(self.sampled_R)).all(), "a row that the step before did not sample"
            tokens[unknown] = self.sampled_R[-1 - tokens[unknown]]
        claims, self.claims = self.claims, None
        self._assert_writes_are_alone(batch)
        slices = len(batch.contexts_S)
        assert claims is None or len(claims) == slices
        for index in range(slices):
            for group in range(len(self.spans)):
                self._write(batch, group, index, claims[index] if claims else None)
        if self.glitch is not None:
            self.finite_GK[0, batch.slots_GT[0, self.glitch % len(batch.tokens_T)]] = False
            self.glitch = None
        read = [self._read(batch, index, claims[index] if claims else None) for index in range(slices)]
        if batch.masked:
            self.sampled_R = np.empty(0, np.int32)  # nobody can build on what is not sampled
            return StampFlight(None, (batch, read))
        sampled = self._sample(batch, read, None)
        self.sampled_R = sampled.tokens_R
        return StampFlight(sampled, None)

    def sample(self, step: InflightStep, masks_MW: Int32s) -> None:
        assert isinstance(step, StampFlight)
        assert step.lacking is not None, "masks for nobody, or for the second time"
        step.sampled, step.lacking = self._sample(*step.lacking, masks_MW), None
        self.sampled_R = step.sampled.tokens_R

    def zero(self, blocks: Items[int]) -> None:
        self.zeroed += len(blocks)
        if self.kept is not None:
            kept, stamps = self.kept
            places = self._slots([kept.index(block) for block in blocks])
        else:
            stamps, places = list(self.stamps), self._slots_there(blocks)
        for stamps_GK, blank in zip(stamps, _BLANK, strict=True):
            stamps_GK[:, places] = blank

    @property
    def mapped(self) -> list[int]:
        extents: list[int] = self.there_E.nonzero()[0].tolist()
        return extents

    def map(self, extents: Items[int]) -> None:
        """What is in it is anything: here what nobody may read."""
        assert self.kept is None, "asleep"
        assert not self.there_E[list(extents)].any(), "an extent is mapped twice"
        self._give(extents)

    def unmap(self, extents: Items[int]) -> None:
        assert self.kept is None, "asleep"
        assert self.there_E[list(extents)].all(), "an extent is unmapped twice"
        secret = {block // self.extent_blocks for block in self.secret_blocks()}
        assert secret.isdisjoint(extents), "a secret is given away with its memory"
        self.there_E[list(extents)] = False

    def copy(self, sources: Items[int], targets: Items[int]) -> None:
        assert set(sources).isdisjoint(targets)
        assert len(set(targets)) == len(targets) == len(sources)
        source_slots, target_slots = self._slots_there(sources), self._slots_there(targets)
        for stamps_GK in self.stamps:
            stamps_GK[:, target_slots] = stamps_GK[:, source_slots]

    busy = False

    @property
    def windows(self) -> None:
        return None

    def gather(self, blocks: Items[int], into: memoryview) -> Gathered:
        slots = self._slots_there(blocks)
        stamps_KF = np.stack([self.position_GK[0, slots], self.token_GK[0, slots]], axis=1)
        into[:] = stamps_KF.astype("<i8").tobytes()
        return Gathered()

    def scatter(self, blocks: Items[int], gathered: memoryview) -> None:
        slots = self._slots_there(blocks)
        stamps_KF = np.frombuffer(bytes(gathered), "<i8").reshape(-1, 2)
        assert not self.secret_GK[0, slots].any(), "what comes from elsewhere is in blocks that are not erased"
        self.position_GK[0, slots], self.token_GK[0, slots] = stamps_KF[:, 0], stamps_KF[:, 1]
        self.scope_GK[0, slots] = self.sequence_GK[0, slots] = -1
        self.finite_GK[0, slots] = True

    def prepare(self) -> int:
        return 0

    def sleep(self, keep: Items[Items[int]]) -> int:
        assert self.kept is None, "asleep already"
        (blocks,) = keep
        slots = self._slots_there(blocks)
        assert not self.secret_GK.any(), "a secret is kept, or given away with its memory"
        self.kept = list(blocks), [stamps_GK[:, slots] for stamps_GK in self.stamps]
        self.there_E[:] = False
        return len(blocks) * self.block_tokens * _SLOT_BYTES

    def wake(self, extents: Items[Items[int]], restore: Items[Items[int]]) -> int:
        assert self.kept is not None, "awake"
        kept, stamps = self.kept
        (there,), (targets,) = extents, restore
        assert len(set(targets)) == len(targets) == len(kept)
        self._give(there)
        self.kept = None
        slots = self._slots_there(targets)
        for stamps_GK, kept_GK in zip(self.stamps, stamps, strict=True):
            stamps_GK[:, slots] = kept_GK
        return len(kept) * self.block_tokens * _SLOT_BYTES

    def arrived(self) -> bool:
        return True

    def close(self) -> None:
        """There is nothing to give back."""

    def usage(self) -> MemoryUsage:
        extent_bytes, min_extents = self.layout.extent_bytes, self.layout.min_extents
        kv_bytes = int(self.there_E.sum()) * extent_bytes
        kept_bytes = len(self.kept[0]) * self.block_tokens * _SLOT_BYTES if self.kept is not None else 0
        return MemoryUsage(
            device_bytes=kv_bytes,
            asleep_bytes=0,
            min_bytes=min_extents * extent_bytes,
            max_bytes=self.extents * extent_bytes,
            memory_bytes=kept_bytes,
            weights_bytes=0,
            kv_bytes=kv_bytes,
            kept_bytes=kept_bytes,
            standby_bytes=min_extents * extent_bytes,
        )

    def _give(self, extents: Items[int]) -> None:
        self.there_E[list(extents)] = True
        slots = np.isin(np.arange(self.position_GK.shape[1]) // self.block_tokens // self.extent_blocks, extents)
        self.position_GK[:, slots] = _RUBBISH
        self.secret_GK[:, slots] = False

    def _slots(self, blocks: Items[int]) -> NDArray[np.int64]:
        at_B = np.array(blocks, np.int64)
        slots: NDArray[np.int64] = (at_B[:, None] * self.block_tokens + np.arange(self.block_tokens)).reshape(-1)
        return slots

    def _slots_there(self, blocks: Items[int]) -> NDArray[np.int64]:
        """Raises IllegalRead where one has no memory."""
        self._assert_there(np.array(blocks, np.int64))
        return self._slots(blocks)

    def _assert_there(self, blocks: NDArray[np.integer]) -> None:
        absent = blocks[~self.there_E[blocks // self.extent_blocks]]
        if len(absent):
            raise IllegalRead(f"blocks {absent.tolist()} have no memory")

    def secret_blocks(self) -> set[int]:
        """Those in which something is that has to be erased."""
        blocks: list[int] = (self.secret_GK.any(0).nonzero()[0] // self.block_tokens).tolist()
        return set(blocks)

    def lose(self, packed: Int32s) -> None:
        """What is launched next follows a step that is never done."""
        self.sampled_R = np.zeros_like(unpack_step(packed).rows_R)

    def _assert_writes_are_alone(self, batch: StepBatch) -> None:
        """No slot is written twice, and no block that one slice writes is another's to read."""
        for group, (span, slots_T) in enumerate(zip(self.spans, batch.slots_GT, strict=True)):
            writers: dict[int, int] = {}
            for index, (start, end) in enumerate(_runs(batch)):
                for block in {int(slot) // self.block_tokens for slot in slots_T[start:end]}:
                    if writers.setdefault(block, index) != index:
                        raise IllegalRead(f"slices {writers[block]} and {index} both write block {block}")
            for index, (start, _) in enumerate(_runs(batch)):
                for block in own_table(
                    batch, group, index, span.first(int(batch.positions_T[start])), self.block_tokens
                ).tolist():
                    if writers.get(block, index) != index:
                        raise IllegalRead(f"slice {index} reads block {block} that slice {writers[block]} writes")

    def _write(self, batch: StepBatch, group: int, index: int, claim: Claim | None) -> None:
        start, end = batch.query_starts_S1[index : index + 2].tolist()
        slots = batch.slots_GT[group, start:end]
        self._assert_there(slots // self.block_tokens)
        if claim is not None:
            self._assert_erased(group, slots, claim)
            self.secret_GK[group, slots] = claim.secret
        self.position_GK[group, slots] = -2 if claim and claim.lost else batch.positions_T[start:end]
        self.finite_GK[group, slots] = True
        self.token_GK[group, slots] = batch.tokens_T[start:end]
        self.scope_GK[group, slots] = claim.scope if claim else -1
        self.sequence_GK[group, slots] = claim.sequence if claim else -1

    def _assert_erased(self, group: int, slots: NDArray[np.int32], claim: Claim) -> None:
        """No secret of another scope, or of another sequence that shares nothing, is in the blocks that it writes."""
        blocks = np.unique(slots // self.block_tokens)
        held = (blocks[:, None] * self.block_tokens + np.arange(self.block_tokens)).reshape(-1)
        held = held[self.secret_GK[group, held]]
        same = self.sequence_GK[group, held] == claim.sequence
        same |= (self.scope_GK[group, held] == claim.scope) & claim.shares
        if not same.all():
            raise IllegalRead("a block was given on before it was erased")

    def _read(self, batch: StepBatch, index: int, claim: Claim | None) -> Reading | None:
        """What the slice's rows attend to, or None where it is lost; raises IllegalRead."""
        if claim is not None and claim.lost:
            return None
        return [self._read_group(batch, group, index, claim) for group in range(len(self.spans))]

    def _read_group(
        self, batch: StepBatch, group: int, index: int, claim: Claim | None
    ) -> tuple[int, NDArray[np.int64]]:
        start, end = batch.query_starts_S1[index : index + 2].tolist()
        first, size = self.spans[group].first(int(batch.positions_T[start])), self.block_tokens
        position = np.arange(first, batch.contexts_S[index])
        table = read_table(batch, group, index, first, size)
        self._assert_there(table)
        slots = table[position // size - first // size] * size + position % size
        if not (slots[batch.positions_T[start:end] - first] == batch.slots_GT[group, start:end]).all():
            raise IllegalRead(f"slice {index} writes elsewhere than it reads")
        if not (self.position_GK[group, slots] == position).all():
            raise IllegalRead(f"slice {index} reads positions {self.position_GK[group, slots].tolist()}")
        if claim is not None:
            public = position < claim.public * size
            scopes, sequences = self.scope_GK[group, slots], self.sequence_GK[group, slots]
            if not (scopes[public] == PUBLIC).all():
                raise IllegalRead(f"slice {index} reads as published what is not")
            if not (scopes[~public] == claim.scope).all():
                raise IllegalRead(f"slice {index} of scope {claim.scope} reads scopes {set(scopes[~public].tolist())}")
            if not claim.shares and not (sequences[~public] == claim.sequence).all():
                raise IllegalRead(f"slice {index} shares nothing and reads another sequence")
        return first, np.where(self.finite_GK[group, slots], self.token_GK[group, slots], NOT_FINITE)

    def _sample(self, batch: StepBatch, read: list[Reading | None], masks_MW: Int32s | None) -> RunnerOutput:
        tokens, logprobs = [], {}
        for row, at in enumerate(batch.rows_R.tolist()):
            reading = read[int(np.searchsorted(batch.query_starts_S1, at, "right")) - 1]
            position, settings = int(batch.positions_T[at]), batch.sampling_R[row]
            seen = None if reading is None else self._seen(reading, position)
            if seen is None or (seen == NOT_FINITE).any():
                tokens.append(0 if seen is None else -1)
                continue
            start, end, _ = batch.histories_R3[row].tolist()
            told = batch.history_H[start:end]
            if end > start and (len(told) != position + 1 or seen_by(self.spans, told).tolist() != seen.tolist()):
                raise IllegalRead("the history is not what the KV holds")
            assert settings["position"] == position + 1
            start, end = batch.bias_starts_R1[row : row + 2].tolist()
            bias = dict(zip(batch.bias_ids_B[start:end].tolist(), batch.bias_values_B[start:end].tolist(), strict=True))
            seed = int(settings["seed"]) if settings["temperature"] > 0 else None
            token = next_token(seen, seed, self.vocabulary, bias)
            if settings["mask"] >= 0:
                assert masks_MW is not None
                bits = np.unpackbits(masks_MW[settings["mask"]].view(np.uint8), bitorder="little")
                token = next_allowed(token, bits[: self.vocabulary])
            tokens.append(token)
            if settings["logprobs"] >= 0:
                logprobs[row] = logprobs_of(token, int(settings["logprobs"]))
        return RunnerOutput(np.array(tokens, np.int32), logprobs)

    def _seen(self, reading: Reading, position: int) -> NDArray[np.int64]:
        """What the row at this position sees of it in one group after the other."""
        pairs = zip(self.spans, reading, strict=True)
        return np.concatenate(
            [tokens[span.first(position) - first : position + 1 - first] for span, (first, tokens) in pairs]
        )


def seen_by(spans: Items[KeySpan], tokens: NDArray[np.integer]) -> NDArray[np.int64]:
    """What the last of these tokens' rows sees of them in one group after the other."""
    return np.concatenate([tokens[span.first(len(tokens) - 1) :] for span in spans]).astype(np.int64)


def own_table(batch: StepBatch, group: int, index: int, first: int, size: int) -> Int32s:
    """The slice's blocks, of `size` tokens, from that of key `first` on; raises IllegalRead where its table begins
    behind that."""
    begin = int(batch.table_starts_GS[group, index])
    if first // size < begin:
        raise IllegalRead(f"slice {index} sees key {first}, and its table begins with key {begin * size}")
    return batch.tables_GSW[group][index, first // size - begin : -(-int(batch.contexts_S[index]) // size) - begin]


def read_table(batch: StepBatch, group: int, index: int, first: int, size: int) -> Int32s:
    """The blocks that attention reads for the slice from key `first` on, segment by segment, then its own: those of any
    other member that sees them are the same. Raises IllegalRead."""
    own, end = own_table(batch, group, index, first, size), 0
    for _, low, high, members_M in sorted(batch.segments(group), key=lambda segment: segment[1]):
        if index not in members_M:
            continue
        if batch.query_starts_S1[index + 1] - batch.query_starts_S1[index] != 1:
            raise IllegalRead(f"slice {index} of several rows is in a group")
        if low != end:
            raise IllegalRead(f"slice {index} has a segment from {low} on behind one that ends at {end}")
        for member in members_M.tolist():
            begin = int(batch.table_starts_GS[group, member])
            blocks = np.arange(max(low // size, first // size, begin), high // size)  # that both of them see
            theirs = batch.tables_GSW[group][member, blocks - begin]
            if not (theirs == own[blocks - first // size]).all():
                raise IllegalRead(f"slices {index} and {member} of a group have different blocks")
        end = high
    if end != batch.own_starts_GS[group, index]:
        own_start = batch.own_starts_GS[group, index]
        raise IllegalRead(f"slice {index} reads its own keys from {own_start}, segments to {end}")
    return own


def _runs(batch: StepBatch) -> list[tuple[int, int]]:
    """First and last row of each slice."""
    starts = batch.query_starts_S1.tolist()
    return list(pairwise(starts))


@dataclass(frozen=True, slots=True)
class Rule:
    """A grammar of the simulation: a text ends after so many tokens, and what may be next depends on all before it."""

    length: int
    forcing: bool = True  # in places

    def only(self, written: Items[int], vocabulary: int) -> int | None:
        """The only token that may be next, where there is no choice: runs of up to 5, or of all the text."""
        forced = (len(written) + self.length) % 9 < self.length % 6 or self.length % 7 == 0
        return (sum(written) * 7 + len(written)) % vocabulary if forced and self.forcing else None

    def allowed(self, written: Items[int], vocabulary: int) -> NDArray[np.uint8]:
        """Two of any three tokens that follow each other, or the only one."""
        if (only := self.only(written, vocabulary)) is not None:
            return (np.arange(vocabulary) == only).astype(np.uint8)
        return ((np.arange(vocabulary) + sum(written) * 5 + len(written) + self.length) % 3 > 0).astype(np.uint8)


def next_token(seen: NDArray[np.int64], seed: int | None, vocabulary: int, bias: dict[int, float]) -> int:
    """A digest of the tokens in their order, and of the seed where there is one; a bias of 100 forces its token, one of
    −∞ leaves its place to the next one, counted round."""
    for token, value in bias.items():
        if value >= 100:
            return token
    digest = int((seen.astype(np.uint64) * _POWERS[: len(seen)]).sum(dtype=np.uint64))
    for word in (len(seen), 0 if seed is None else seed + 1):
        digest = ((digest ^ (digest >> 29) ^ word) * int(_STEP)) & _MASK
    token = (digest >> 17) % vocabulary
    while bias.get(token) == -math.inf:
        token = (token + 1) % vocabulary
    return token


def next_allowed(token: int, allowed_V: NDArray[np.integer]) -> int:
    """The token, or the first behind it that is allowed, counted round."""
    return token + int(np.roll(allowed_V, -token).argmax()) - (0 if allowed_V[token:].any() else len(allowed_V))


def logprobs_of(token: int, top: int) -> tuple[float, list[int], list[float]]:
    """What the stamp engine reports beside a token."""
    return -1.0 - token, [token + rank for rank in range(top)], [-1.0 - token - rank for rank in range(top)]


def solo(
    prompt: Items[int], sampling: SamplingParams, tokens_max: int, stop_ids: Items[int], vocabulary: int,
    rule: Rule | None = None, spans: Items[KeySpan] = (FULL,),
) -> tuple[list[int], str]:  # fmt: skip
    """What this prompt gives when it runs alone: the output tokens and how it finishes."""
    tokens = list(prompt)
    seed = sampling.seed if sampling.temperature > 0 else None
    stop_ids = () if sampling.ignore_eos else stop_ids
    early = {**sampling.logit_bias, **dict.fromkeys(stop_ids, -math.inf)}
    while True:
        bias = early if len(tokens) - len(prompt) < sampling.min_tokens else sampling.logit_bias
        token = next_token(seen_by(spans, np.array(tokens)), seed, vocabulary, bias)
        if rule is not None:
            token = next_allowed(token, rule.allowed(tokens[len(prompt) :], vocabulary))
        tokens.append(token)
        if token in stop_ids or (rule is not None and len(tokens) - len(prompt) >= rule.length):
            return tokens[len(prompt) :], "stop"
        if len(tokens) >= tokens_max:
            return tokens[len(prompt) :], "length"


class Temper(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a stamp replica behaves: its sizes (None: one extent) and bounds, the time of a step, the steps (from 1) that
    raise, and how often it has something to prepare while there is nothing to compute."""

    depth: int = 1
    blocks: int = 1024
    extent_blocks: int | None = None
    context_tokens: int = 4096
    vocabulary: int = 1000
    stop_ids: list[int] = []
    step_ms: float = 0.0
    failing: list[int] = []
    preparations: int = 0
    drain_s: float = 10.0
    unsent_bytes: int = 4 << 20
    connections: int = 256


class TemperedStamps(Stamps):
    """Stamps that take their time, or fail."""

    def __init__(self, temper: Temper, spec: ReplicaSpec, beat: Callable[[], None]) -> None:
        model = spec.model
        super().__init__(
            temper.blocks, model.block_tokens, temper.context_tokens, temper.vocabulary, temper.stop_ids,
            temper.extent_blocks, None, temper.depth, model.sequences or 64,
        )  # fmt: skip
        self._temper = temper
        self._beat = beat
        self._step = 0
        self._prepared = 0

    def warm_up(self) -> bool:
        self._prepared += 1
        if self._prepared == self._temper.preparations:
            log("prepared", times=self._prepared, steps=self._step)
        return self._prepared < self._temper.preparations

    def close(self) -> None:
        """Tells of it."""
        log("closed")

    def launch(self, packed: Int32s) -> StampFlight:
        self._step += 1
        time.sleep(self._temper.step_ms / 1e3)
        self._beat()
        if self._step in self._temper.failing:
            raise RuntimeError(f"step {self._step} fails as it was told to")
        return super().launch(packed)


def main(argv: list[str]) -> int:
    from engine.replica import server
    from engine.replica.replica import ReplicaLimits

    temper = msgspec.json.decode(argv[1], type=Temper) if len(argv) > 1 else Temper()

    def open_stamps(spec: ReplicaSpec, beat: Callable[[], None]) -> LoadedModel:
        return TemperedStamps(temper, spec, beat).loaded()

    bounds = ReplicaLimits(drain_s=temper.drain_s, unsent_bytes=temper.unsent_bytes, connections=temper.connections)
    return server.run(msgspec.json.decode(argv[0], type=ReplicaSpec), open_stamps, bounds)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
