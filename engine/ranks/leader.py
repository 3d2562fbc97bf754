"""Rank 0's model of several ranks: what its parts are told is said to all followers first, and done here then.

Steps are not waited for: ranks meet in their exchanges. What may be refused is: it is done on all ranks or on none, and
the answer upward is one. It knows neither processes nor what is computed.
"""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import msgspec

from engine.kvcache.slot_tier import SlotTier
from engine.log import log
from engine.memory.errors import CaptureFailed, OutOfDeviceMemory, OutOfHostMemory
from engine.protocol.types import RankLoad
from engine.ranks.command_ring import CommandKind, CommandWriter
from engine.ranks.group import RankGroup, RankLost
from engine.step.cost_model import CostModel
from engine.step.exchange import BlockExchange
from engine.step.executor import (
    Arrival,
    DecoderExecutor,
    DecoderMemory,
    InflightStep,
    LoadedModel,
    MemoryUsage,
    PagedMemory,
)
from engine.step.layout import Int32s, unpack_step
from engine.step.limits import check_step

REFUSALS: Final = {error.__name__: error for error in (OutOfDeviceMemory, OutOfHostMemory, CaptureFailed)}
"""What a rank may answer instead of doing a command: nothing has changed on it then."""
_MOVE_STALL_S: Final = 60.0  # a GPU's rank says nothing while it pins host memory, some 3 ms for 32 MiB
_OF_THE_HOST: Final = ("memory_bytes", "kept_bytes", "standby_bytes")  # of what a MemoryUsage counts


@dataclass(frozen=True, slots=True)
class RankCommand:
    """Something that every rank does: what followers are told, and what rank 0 does itself."""

    kind: CommandKind
    payload: tuple[object, ...]
    act: Callable[[], int | None]


class RankCommands:
    """Says commands to the followers of a group, and collects what they answer.

    begin_launched  sends what was launched and waits for tokens: what is said comes behind it.
    """

    def __init__(self, group: RankGroup) -> None:
        self.group = group
        self.begin_launched: Callable[[], None] = lambda: None
        self._writer = CommandWriter(group.board, group.wakers)

    def say(self, kind: CommandKind, *payload: object) -> int:
        """Tells the followers something. Returns the command's number. Raises RankLost."""
        self.begin_launched()
        return self.send(kind, msgspec.msgpack.encode(payload))

    def send(self, kind: CommandKind, payload: bytes) -> int:
        self.group.begin()
        if kind == CommandKind.LAUNCH:
            self.group.board.steps_W[0] += 1
        return self._writer.publish(kind, payload, self.group.wait)

    def close(self) -> None:
        """Tells the followers to end, where they can still hear it."""
        if not self.group.board.aborted:
            self.say(CommandKind.CLOSE)
            self.group.closing = True

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Rank 0 computes within it what followers compute too: an error there is the end of all."""
        try:
            with self.group.working():
                yield
        except RankLost:
            raise
        except Exception as error:
            raise self.group.lose(f"rank 0 failed in a step: {error!r}"[:300]) from error

    def do(self, command: RankCommand) -> None:
        """Does what no rank may refuse, in the order of what was said before, and waits for nobody. Raises RankLost."""
        self.say(command.kind, *command.payload)
        self._act(command)

    def attempt(self, command: RankCommand, undo: RankCommand) -> int:
        """Does a command on all ranks. Returns what rank 0's `act` did. Where one refuses, those that did it do `undo`,
        and the refusal is raised. Raises RankLost."""
        number, refusal, result = self.say(command.kind, *command.payload), None, 0
        try:
            result = self._act(command)
        except tuple(REFUSALS.values()) as error:
            refusal = error
        refused = self._refusals(number)
        if refusal is None and not refused:
            return result
        # A follower that refused the command of this number leaves out what takes it back.
        taken_back = self.say(undo.kind, *undo.payload, number)
        if refusal is None:
            rank, (name, _, reason) = next((rank, text.partition(": ")) for rank, text in refused.items())
            refusal = REFUSALS[name](f"rank {rank}: {reason}")
            self._act(undo, final=True)
        if self._refusals(taken_back):
            raise self.group.lose(f"{command.kind.name} could not be taken back on all ranks")
        raise refusal

    def wait(self, number: int) -> None:
        """Returns when all followers have done a command that none may refuse. Raises RankLost."""
        if refused := self._refusals(number):
            raise self.group.lose(f"rank {next(iter(refused))} refused what it may not")

    def _refusals(self, number: int) -> dict[int, str]:
        """What the followers say that refused a command, by rank, when all have answered."""
        board = self.group.board
        self.group.wait(lambda: bool((board.ended_W[1:] >= number).all()))
        return {rank: board.error(rank) for rank in range(1, board.ranks) if board.failed_W[rank] == number}

    def _act(self, command: RankCommand, final: bool = False) -> int:
        """Anything but a refusal, and a refusal of what is `final`, leaves ranks unlike each other."""
        try:
            with self.group.working():
                return command.act() or 0
        except RankLost:
            raise
        except Exception as error:
            if isinstance(error, tuple(REFUSALS.values())) and not final:
                raise
            raise self.group.lose(f"rank 0 failed: {error!r}"[:300]) from error


class RankedExecutor:
    """A DecoderExecutor of several ranks. Only rank 0 samples."""

    def __init__(self, local: DecoderExecutor, commands: RankCommands) -> None:
        self.limits = local.limits
        self.costs: CostModel | None = local.costs
        self.local = local
        self.sample = local.sample
        self.warm_up = local.warm_up
        self._commands = commands

    def launch(self, packed: Int32s) -> InflightStep:
        """As in StepExecutor. A step that names what is not there is refused before a follower begins it."""
        check_step(unpack_step(packed), self.limits)
        self._commands.send(CommandKind.LAUNCH, packed.tobytes())
        with self._commands.computing():
            return self.local.launch(packed)


class RankedPagedMemory:
    """A PagedMemory of several ranks: the blocks have the same numbers on all of them.

    layout  as rank 0's, with the bytes that a block takes on all ranks of one device, and the name of whole blocks.
    """

    def __init__(self, local: PagedMemory, index: int, commands: RankCommands, name: str, block_bytes: int) -> None:
        self.layout = replace(local.layout, name=name, block_bytes=block_bytes)
        self._local = local
        self._index = index
        self._commands = commands

    @property
    def mapped(self) -> list[int]:
        return self._local.mapped

    def zero(self, blocks: Items[int]) -> None:
        self._do(CommandKind.ZERO, lambda: self._local.zero(blocks), [*blocks])

    def copy(self, sources: Items[int], targets: Items[int]) -> None:
        self._do(CommandKind.COPY, lambda: self._local.copy(sources, targets), [*sources], [*targets])

    def map(self, extents: Items[int]) -> None:
        """As in PagedMemory, on all ranks or on none."""
        payload = (self._index, [*extents])
        self._commands.attempt(
            RankCommand(CommandKind.MAP, payload, lambda: self._local.map(extents)),
            RankCommand(CommandKind.UNMAP, payload, lambda: self._local.unmap(extents)),
        )

    def unmap(self, extents: Items[int]) -> None:
        self._do(CommandKind.UNMAP, lambda: self._local.unmap(extents), [*extents])

    def _do(self, kind: CommandKind, act: Callable[[], None], *payload: list[int]) -> None:
        self._commands.do(RankCommand(kind, (self._index, *payload), act))


def grow_or_refuse(tier: SlotTier) -> None:
    """Adds slots to one rank's tier. Raises OutOfHostMemory where the host has no more for them."""
    if not tier.grow():
        raise OutOfHostMemory("the host has no more memory for KV")


class RankedTier:
    """A BlockTier of several ranks, each of which has its part of every block in slots of its own. `copied` speaks of
    rank 0's."""

    files = None

    def __init__(self, local: SlotTier, commands: RankCommands) -> None:
        self.copied = local.copied
        self._local = local
        self._commands = commands

    @property
    def slots(self) -> int:
        return self._local.slots

    @property
    def max_slots(self) -> int:
        return self._local.max_slots

    def grow(self) -> bool:
        """As in BlockTier, on all ranks or on none: where one has no more memory, none is asked again."""
        if self.slots == self.max_slots:
            return False
        try:
            self._commands.attempt(
                RankCommand(CommandKind.TIER_GROW, (), partial(grow_or_refuse, self._local)),
                RankCommand(CommandKind.TIER_SHRINK, (), self._local.shrink),
            )
        except OutOfHostMemory as error:
            log("host_tier_stays_small", level="warning", bytes=self._local.held_bytes, error=str(error))
            self._local.max_pieces = self.slots // self._local.piece_slots
            return False
        return True

    def store(self, blocks: Items[int], slots: Items[int]) -> None:
        self._do(CommandKind.TIER_STORE, partial(self._local.store, blocks, slots), [*blocks], [*slots])

    def load(self, slots: Items[int], blocks: Items[int]) -> Arrival:
        arrivals = list[Arrival]()
        self._do(CommandKind.TIER_LOAD, lambda: arrivals.append(self._local.load(slots, blocks)), [*slots], [*blocks])
        return RankedArrival(arrivals[0], self._commands)

    def zero(self, slots: Items[int]) -> None:
        self._do(CommandKind.TIER_ZERO, partial(self._local.zero, slots), [*slots])

    def _do(self, kind: CommandKind, act: Callable[[], None], *payload: list[int]) -> None:
        self._commands.do(RankCommand(kind, payload, act))


class RankedArrival:
    """A load of all ranks. The host sees rank 0's end; where it was waited for, the others launch steps behind theirs.
    Loads are waited for in their order."""

    def __init__(self, local: Arrival, commands: RankCommands) -> None:
        self.passed = local.passed
        self._local = local
        self._commands = commands

    def wait(self) -> None:
        self._local.wait()
        self._commands.say(CommandKind.TIER_JOIN)


@dataclass(frozen=True, slots=True)
class StageBytes:
    """What a stage takes of each of its devices: weights, and a block of each KV group."""

    weights_bytes: int
    block_bytes: tuple[int, ...]


class RankedMemory:
    """A DecoderMemory of several ranks on one host, which sleep and wake as one."""

    def __init__(
        self, local: DecoderMemory, commands: RankCommands, layouts: Items[str],
        shared_block_bytes: Items[int] | None = None, stages: Items[StageBytes] = (),
    ) -> None:  # fmt: skip
        """`layouts` are the names of whole blocks of each group: replicas whose ranks alone differ may exchange them.
        `shared_block_bytes`: all ranks are on one device, as on a CPU, and a block of each memory takes so much on
        all of them; else each has its own, and its bytes are counted of each. `stages` say of those with devices of
        their own what is unlike there: what is counted is what the fullest device has."""
        self._shared = shared_block_bytes is not None
        self._patience_s = None if self._shared else _MOVE_STALL_S
        sizes = shared_block_bytes or [memory.layout.block_bytes for memory in local.memories]
        self._stages = stages if len(stages) > 1 else ()
        if self._stages:
            most = [max(counts) for counts in zip(*(stage.block_bytes for stage in stages), strict=True)]
            sizes = [0] * (len(local.memories) - len(most)) + most
        unkept = [memory.layout.name for memory in local.memories[: -len(layouts)]]
        self.memories: tuple[PagedMemory, ...] = tuple(
            RankedPagedMemory(memory, index, commands, name, block_bytes)
            for index, (memory, name, block_bytes) in enumerate(
                zip(local.memories, [*unkept, *layouts], sizes, strict=True)
            )
        )
        self.tier = RankedTier(local.tier, commands) if isinstance(local.tier, SlotTier) else None
        self.arrived, self.images = local.arrived, local.images
        self.local = local
        self._commands = commands

    @property
    def devices(self) -> int:
        """As LoadedModel has them."""
        return 1 if self._shared else self._commands.group.board.ranks

    def prepare(self) -> int:
        """As in Sleeper, on all ranks."""
        self._commands.say(CommandKind.PREPARE)
        return self.local.prepare()

    def sleep(self, keep: Items[Items[int]]) -> int:
        """As in Sleeper: where one rank has no memory for what is to be kept, all stay awake."""
        blocks, extents = [[*each] for each in keep], [memory.mapped for memory in self.memories]
        return self._attempt(
            RankCommand(CommandKind.SLEEP, (blocks,), lambda: self.local.sleep(blocks)),
            RankCommand(CommandKind.WAKE, (extents, blocks), lambda: self.local.wake(extents, blocks)),
        )

    def wake(self, extents: Items[Items[int]], restore: Items[Items[int]]) -> int:
        """As in Sleeper: where one rank has no memory, all sleep on."""
        there, blocks = [[*each] for each in extents], [[*each] for each in restore]
        return self._attempt(
            RankCommand(CommandKind.WAKE, (there, blocks), lambda: self.local.wake(there, blocks)),
            RankCommand(CommandKind.SLEEP, (blocks,), lambda: self.local.sleep(blocks)),
        )

    def usage(self) -> MemoryUsage:
        """As in Sleeper: of all ranks where these share a device; else every rank holds as much as rank 0."""
        own, board = self.local.usage(), self._commands.group.board
        if not self._shared:
            own = own if not self._stages else self._fullest(own)
            host = {name: board.ranks * getattr(own, name) for name in _OF_THE_HOST}
            return replace(own, **host)
        layouts, weights_bytes = [memory.layout for memory in self.memories], int(board.weights_bytes_W.sum())
        mapped = [len(memory.mapped) * memory.layout.extent_bytes for memory in self.memories]
        block_bytes = sum(layout.block_bytes for layout in layouts)
        own_block_bytes = sum(memory.layout.block_bytes for memory in self.local.memories)
        kept_bytes, standby_bytes = (
            count * block_bytes // own_block_bytes for count in (own.kept_bytes, own.standby_bytes)
        )
        return MemoryUsage(
            device_bytes=weights_bytes + sum(mapped) if own.device_bytes else 0, asleep_bytes=0,
            min_bytes=weights_bytes + sum(layout.min_extents * layout.extent_bytes for layout in layouts),
            max_bytes=weights_bytes + max(layout.extents * layout.extent_bytes for layout in layouts),
            memory_bytes=kept_bytes, weights_bytes=weights_bytes, kv_bytes=sum(mapped), kept_bytes=kept_bytes,
            standby_bytes=standby_bytes,
        )  # fmt: skip

    def _fullest(self, own: MemoryUsage) -> MemoryUsage:
        """What rank 0 uses, with the most of everything that a device of some stage has instead."""
        first, usages = self._stages[0], []
        groups = self.local.memories[-len(first.block_bytes) :]
        own_extents = [memory.layout.extent_blocks * memory.layout.block_bytes for memory in groups]
        own_fixed = own.max_bytes - max(
            size * memory.layout.extents for size, memory in zip(own_extents, groups, strict=True)
        )
        asleep_fixed = own.device_bytes if not own.device_bytes > own.asleep_bytes else 0
        for stage in self._stages:
            weights = stage.weights_bytes - first.weights_bytes
            sizes = [memory.layout.extent_blocks * size for memory, size in zip(groups, stage.block_bytes, strict=True)]
            kv_bytes = sum(len(memory.mapped) * size for memory, size in zip(groups, sizes, strict=True))
            fixed = own_fixed + weights
            usages.append(
                replace(
                    own, device_bytes=asleep_fixed or fixed + kv_bytes, kv_bytes=kv_bytes,
                    min_bytes=fixed + sum(m.layout.min_extents * size for m, size in zip(groups, sizes, strict=True)),
                    max_bytes=fixed + max(m.layout.extents * size for m, size in zip(groups, sizes, strict=True)),
                    weights_bytes=own.weights_bytes + weights,
                )
            )  # fmt: skip
        names = ("device_bytes", "kv_bytes", "min_bytes", "max_bytes", "weights_bytes")
        return replace(own, **{name: max(getattr(usage, name) for usage in usages) for name in names})

    def _attempt(self, command: RankCommand, undo: RankCommand) -> int:
        group = self._commands.group
        with nullcontext() if self._patience_s is None else group.patient(self._patience_s):
            return group.board.ranks * self._commands.attempt(command, undo)

    def rank_loads(self) -> list[RankLoad]:
        """What each rank has done so far, and holds."""
        board = self._commands.group.board
        board.device_bytes_W[0] = self.local.usage().device_bytes
        columns = (board.steps_W, board.waited_us_W // 1000, board.device_bytes_W)
        return [RankLoad(*numbers) for numbers in zip(*(column.tolist() for column in columns), strict=True)]


def ranked_model(loaded: LoadedModel, exchange: BlockExchange | None, parts: int) -> LoadedModel:
    """The model with what its memory, which is that of several ranks, says of them, and with their exchange; their sums
    have so many parts."""
    memory = loaded.sleeper
    assert isinstance(memory, RankedMemory)
    return replace(loaded, rank_loads=memory.rank_loads, devices=memory.devices, parts=parts, exchange=exchange)
