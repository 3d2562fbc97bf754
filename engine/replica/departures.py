"""Sequences that move away from a replica, between two steps: their full blocks are copied into what the handovers'
threads send. It knows no sockets of gateways and no steps.

A sequence that moves goes on computing here, and its blocks follow it run by run; once the receiver holds all there are
it ends as moved. Where devices copy them, which takes a few milliseconds, a prompt is computed to its end and no
further: what another step here gave would come later than from the receiver. Its steps are short enough that little is
left to copy behind the last one. Whatever goes wrong before that ends its handover, and nothing else.
"""

import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from engine.handover.dial import dial
from engine.handover.fabric import FabricEndpoints
from engine.handover.messages import WINDOW_RUN_BYTES_MAX
from engine.handover.receiver import BlockFormat
from engine.handover.sender import HandoverPlan, HandoverState, OutgoingHandover
from engine.log import log
from engine.memory.errors import OutOfDeviceMemory, OutOfHostMemory
from engine.protocol.cache_frames import HandOver, HandOverFailed
from engine.protocol.types import PrefillLoad
from engine.scheduling.intake import Intake
from engine.sequences.sequence import Sequence, SequenceState
from engine.step.exchange import BlockExchange
from prefixcache.names import BlockNames, next_name
from prefixcache.namespace import Namespace
from prefixcache.radix import TOKEN_BYTES

OUTGOING_MAX: Final = 64  # sequences that move away at once
_TURN_BYTES: Final = 8 << 20  # copied between two steps by the host,
_TURN_WINDOW_BYTES: Final = 1 << 30  # or by a device, for which the next steps wait: 3 ms of NVLink
LINKS_MAX: Final = 64  # whose speed is remembered
_LINK_KEPT: Final = 0.75  # of a link's speed, when another handover has measured it
_STOPPED_S: Final = 0.1  # that a sequence waits for its handover, from the end of its prompt on
_END_S: Final = 0.5  # for a handover that was given up to let go of its memory
_CHUNK_BYTES: Final = WINDOW_RUN_BYTES_MAX  # that a step adds to what a device copies behind it,
_CHUNK_TOKENS_MIN: Final = 1024  # or more: shorter steps do not make up for reading the weights
_MORE_BLOCKS: Final = 4  # that a sequence may fill while it moves, beyond which they are computed again


@dataclass(slots=True)
class _Departure:
    """A sequence that is to move; `name` is that of the last block that was pushed. From `resumes_s` on it may compute
    more than its prompt."""

    sequence: Sequence
    order: HandOver
    name: bytes
    outgoing: OutgoingHandover | None = None
    resumes_s: float = 0.0


@dataclass
class Departures:
    """The sequences that move away.

    address    where this replica takes in handovers; empty: nothing moves here.
    fabric     the endpoints of the one that this host declares; None: of none.
    on_news    is called by a handover's thread.
    counters   of sequences moved and failed, moved_blocks, sent_blocks, of these window_blocks, which a device copied,
               and fabric_blocks, which an endpoint wrote; and off_fabric, of sequences that went to another host over
               the socket, in part or in whole, though this one declares a fabric.
    links      bytes a second that blocks came at, by the address of whoever took them; of the latest LINKS_MAX.
    """

    exchange: BlockExchange | None
    format: BlockFormat
    intake: Intake
    unshared: Namespace
    address: str
    on_news: Callable[[], None]
    clock: Callable[[], float] = time.monotonic
    fabric_name: str = ""
    counters: Counter[str] = field(default_factory=Counter)
    links: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.fabric = FabricEndpoints(self.fabric_name) if self.address and self.fabric_name else None
        self._moving: dict[tuple[int, int], _Departure] = {}
        self._failed: list[tuple[int, HandOverFailed]] = []

    @property
    def held(self) -> int:
        """How many sequences move now."""
        return len(self._moving)

    @property
    def resumes_s(self) -> float:
        """When the first sequence that waits for its handover goes on without."""
        waiting = (each for each in self._moving.values() if each.sequence.stop_at is not None)
        return min((each.resumes_s for each in waiting), default=math.inf)

    def prefill_load(self) -> PrefillLoad | None:
        """What computing a prompt takes here and how much of that is to do; None where nothing moves."""
        if not self.address:
            return None
        costs = self.intake.step_costs
        live = [each for each in self.intake.waiting.sequences.values() if not each.background]
        running = [each for each in live if each.state == SequenceState.RUNNING]
        decoding = sum(each.decoding for each in running)
        leaving = sum(each.decoding for each in self._sequences)
        prompts = [(len(each.tokens), each.computed) for each in live if len(each.tokens) - each.computed > 1]
        return PrefillLoad(
            len(prompts),
            sum(tokens - computed for tokens, computed in prompts),
            sum((tokens - computed) * (tokens + computed + 1) / 2 for tokens, computed in prompts),
            decoding,
            min(leaving, decoding),
            self._unsent_tokens,
            costs.chunk_tokens,
            *costs.costs,
            self._token_bytes,
            self.links,
        )

    def begin(self, owner: int, order: HandOver) -> None:
        """Moves a sequence. One that has ended, or that nobody knows, needs no answer: its end is on its way."""
        sequence = self.intake.waiting.sequences.get((owner, order.id))
        if sequence is None:
            return
        if not self.address:
            self._fail(owner, order.id, "this replica hands over no KV: set handover_bytes, for a model that can")
        elif sequence.images:
            self._fail(
                owner, order.id, "a prompt with images is computed anew: their KV has names in one replica alone"
            )
        elif (owner, order.id) in self._moving:
            self._fail(owner, order.id, "it moves already")
        elif len(self._moving) >= OUTGOING_MAX:
            self._fail(owner, order.id, f"{OUTGOING_MAX} sequences move away already")
        else:
            root = BlockNames(order.key).root(sequence.namespace or self.unshared)
            self._moving[owner, order.id] = departure = _Departure(sequence, order, root)
            windows = self.exchange is not None and self.exchange.windows is not None
            if windows and order.address.startswith("unix:") and not sequence.emitted:
                departure.resumes_s, sequence.stop_at = math.inf, len(sequence.tokens)
                sequence.chunk_limit = max(_CHUNK_TOKENS_MIN, _CHUNK_BYTES // self._token_bytes)

    def turn(self) -> list[tuple[int, HandOverFailed]]:
        """Moves what can be moved now. Returns what failed, with its owners."""
        budget = 1.0
        for key, departure in list(self._moving.items()):
            budget -= self._advance(key, departure, budget)
        failed, self._failed = self._failed, []
        return failed

    @property
    def _token_bytes(self) -> int:
        return self.format.block_bytes // self.unshared.block_tokens

    @property
    def _sequences(self) -> list[Sequence]:
        """The sequences that move now, and run."""
        moving = (each.sequence for each in self._moving.values())
        return [sequence for sequence in moving if sequence.state == SequenceState.RUNNING]

    @property
    def _unsent_tokens(self) -> int:
        """Tokens of the sequences that move whose KV is there and was not copied yet."""
        size = self.unshared.block_tokens
        pushed = [
            (each.sequence.computed, 0 if each.outgoing is None else each.outgoing.pushed * size)
            for each in self._moving.values()
        ]
        return sum(max(0, computed - sent) for computed, sent in pushed)

    def close(self) -> None:
        """Ends them all."""
        outgoing = [each.outgoing for each in self._moving.values() if each.outgoing is not None]
        for each in outgoing:
            each.abort()
        for each in outgoing:
            each.wait_ended(_END_S)
        self._moving.clear()
        if self.fabric is not None:
            self.fabric.close()

    def _advance(self, key: tuple[int, int], departure: _Departure, budget: float) -> float:
        """Takes a departure as far as it goes now. Returns how much of a turn's copies it took, about `budget` at
        most."""
        sequence, outgoing = departure.sequence, departure.outgoing
        self._resume(departure)
        if sequence.state == SequenceState.ENDED:
            self._end(key)
        elif outgoing is None:
            if sequence.state == SequenceState.RUNNING:
                departure.outgoing = self._open(departure)
        elif outgoing.state == HandoverState.FAILED:
            self._end(key, outgoing.problem)
        elif outgoing.state == HandoverState.SEALED:
            self.counters["moved"] += 1
            self.counters["moved_blocks"] += outgoing.whole
            self._learn(outgoing)
            self._end(key)
            self.intake.move(sequence)
        elif sequence.state != SequenceState.RUNNING:
            self._end(key, "it was preempted, and has no blocks any more")
        elif outgoing.state == HandoverState.MOVING:
            try:
                return self._push(departure, outgoing, budget)
            except (OutOfDeviceMemory, OutOfHostMemory) as error:
                self._end(key, str(error))
        return 0.0

    def _resume(self, departure: _Departure) -> None:
        """Has a sequence compute on that was to stop behind its prompt: where no device copies its blocks after all,
        and where that takes long."""
        sequence, outgoing = departure.sequence, departure.outgoing
        if sequence.stop_at is None:
            return
        if departure.resumes_s == math.inf and sequence.emitted:
            departure.resumes_s = self.clock() + _STOPPED_S
        copied_here = outgoing is not None and outgoing.state == HandoverState.MOVING and not outgoing.in_window
        if copied_here or self.clock() >= departure.resumes_s:
            sequence.stop_at = sequence.chunk_limit = None

    def _learn(self, outgoing: OutgoingHandover) -> None:
        """Takes in how fast a handover's blocks came."""
        if outgoing.bytes_s:
            address = outgoing.plan.address
            before = self.links.pop(address, outgoing.bytes_s)
            self.links[address] = _LINK_KEPT * before + (1 - _LINK_KEPT) * outgoing.bytes_s
            if len(self.links) > LINKS_MAX:
                del self.links[next(iter(self.links))]

    def _open(self, departure: _Departure) -> OutgoingHandover:
        sequence, order, size = departure.sequence, departure.order, self.unshared.block_tokens
        whole = min(len(sequence.tokens) // size + _MORE_BLOCKS, (sequence.max_total_tokens - 1) // size)
        plan = HandoverPlan(order.address, order.boot, order.key, max(1, whole), sequence.regions)
        folder = self.address.removeprefix("unix:").rpartition("/")[0]
        windows = None if self.exchange is None else self.exchange.windows
        return OutgoingHandover(
            plan, self.format, partial(dial, folder=folder), self.on_news, windows=windows, fabric=self.fabric
        )

    def _push(self, departure: _Departure, outgoing: OutgoingHandover, budget: float) -> float:
        """Begins to copy blocks that are full, and seals once these were all and the prompt's end is among them.
        Returns how much of a turn's copies that took. Raises OutOfDeviceMemory and OutOfHostMemory."""
        assert self.exchange is not None
        sequence, size, taken = departure.sequence, self.unshared.block_tokens, 0.0
        turn_bytes = _TURN_WINDOW_BYTES if outgoing.in_window else _TURN_BYTES
        full = min(sequence.computed // size, outgoing.plan.blocks)
        while outgoing.pushed < full and taken < budget and not self.exchange.busy:
            first, count = outgoing.pushed, min(full - outgoing.pushed, outgoing.max_run)
            if (piece := outgoing.piece(count)) is None:
                break
            piece.fill(self.exchange, sequence.table[first : first + count].tolist())
            names, packed = [], memoryview(sequence.tokens).cast("B")
            for block in range(first, first + count):
                start = block * size * TOKEN_BYTES
                departure.name = next_name(departure.name, packed[start : start + size * TOKEN_BYTES])
                names.append(departure.name)
            packed.release()
            outgoing.push(names, piece)
            self.counters["sent_blocks"] += count
            self.counters["window_blocks"] += count * outgoing.in_window
            taken += count * self.format.block_bytes / turn_bytes
        if outgoing.pushed >= full and sequence.emitted and sequence.decoding and not sequence.loading_blocks:
            outgoing.seal()
        return taken

    def _end(self, key: tuple[int, int], problem: str | None = None) -> None:
        """Ends a departure; with a problem its sequence stays."""
        departure = self._moving.pop(key)
        departure.sequence.stop_at = departure.sequence.chunk_limit = None
        if departure.outgoing is not None:
            departure.outgoing.abort()
            self.counters["fabric_blocks"] += departure.outgoing.over_fabric
            self.counters["off_fabric"] += departure.outgoing.off_fabric
        if problem is not None:
            self._fail(*key, problem)

    def _fail(self, owner: int, id: int, problem: str) -> None:
        self.counters["failed"] += 1
        log("handover_failed", level="warning", problem=problem)
        self._failed.append((owner, HandOverFailed(id, problem)))
