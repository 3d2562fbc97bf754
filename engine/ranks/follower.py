"""A follower's side of a model of several ranks: it does what rank 0 says, in that order, and decides nothing."""

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, Protocol

import msgspec

from engine.kvcache.slot_tier import SlotTier
from engine.memory.errors import OutOfHostMemory
from engine.memory.streams import StreamEvent
from engine.ranks.block_exchange import RankBlocks
from engine.ranks.board import RankBoard
from engine.ranks.command_ring import COMPUTES, Command, CommandKind, CommandReader
from engine.ranks.leader import REFUSALS, grow_or_refuse
from engine.step.executor import DecoderMemory

_CHANGES_MEMORY: Final = frozenset(
    {CommandKind.MAP, CommandKind.UNMAP, CommandKind.SLEEP, CommandKind.WAKE, CommandKind.CAPTURE, CommandKind.DROP}
)


class RankGraphs(Protocol):
    """What of a rank's computation is captured when rank 0 says so (GpuRunner, StageRunner)."""

    def capture(self, graphs: int, size: int) -> None: ...

    def drop(self, graphs: int, size: int) -> None: ...


class FollowerModel:
    """This rank's part of the model: `compute` takes a step as rank 0 sent it, and its results go into the ranks'
    exchanges; `head` what rank 0 says of rows that came back to the first stage. `graphs` is there on GPUs, `blocks`
    where they go to other replicas."""

    def __init__(
        self, compute: Callable[[bytes], object], memory: DecoderMemory, graphs: RankGraphs | None = None,
        head: Callable[[bytes], object] | None = None, blocks: RankBlocks | None = None,
    ) -> None:  # fmt: skip
        self._compute = compute
        self._head = head
        self._memory = memory
        self._graphs = graphs
        self._blocks = blocks
        self._loads: deque[StreamEvent] = deque()

    def apply(self, command: Command) -> None:
        """Does a command. Raises what REFUSALS name where nothing has changed, and all else where something has."""
        if command.kind == CommandKind.HEAD:
            if self._head is not None:
                self._head(command.payload)
            return
        if command.kind in COMPUTES:
            self._compute(command.payload)
            return
        payload = msgspec.msgpack.decode(command.payload)
        match command.kind:
            case CommandKind.SLEEP:
                self._memory.sleep(payload[0])
            case CommandKind.WAKE:
                self._memory.wake(payload[0], payload[1])
            case CommandKind.PREPARE:
                with suppress(OutOfHostMemory):  # the machine hears of it when it orders the model to sleep
                    self._memory.prepare()
            case CommandKind.CAPTURE | CommandKind.DROP:
                assert self._graphs is not None
                captures = command.kind == CommandKind.CAPTURE
                (self._graphs.capture if captures else self._graphs.drop)(payload[0], payload[1])
            case CommandKind.GATHER | CommandKind.SCATTER:
                assert self._blocks is not None
                gathers = command.kind == CommandKind.GATHER
                (self._blocks.gather if gathers else self._blocks.scatter)(payload[0], payload[1])
            case kind if kind.name.startswith("TIER_"):
                self._apply_to_tier(kind, payload)
            case kind:
                memory, blocks = self._memory.memories[payload[0]], payload[1]
                match kind:
                    case CommandKind.ZERO:
                        memory.zero(blocks)
                    case CommandKind.COPY:
                        memory.copy(blocks, payload[2])
                    case CommandKind.MAP:
                        memory.map(blocks)
                    case CommandKind.UNMAP:
                        memory.unmap(blocks)
                    case _:
                        raise ValueError(f"command {kind!r} to a model that is open")

    def _apply_to_tier(self, kind: CommandKind, payload: list[Any]) -> None:
        tier = self._memory.tier
        assert isinstance(tier, SlotTier)
        match kind:
            case CommandKind.TIER_GROW:
                grow_or_refuse(tier)
            case CommandKind.TIER_SHRINK:
                tier.shrink()
            case CommandKind.TIER_ZERO:
                tier.zero(payload[0])
            case CommandKind.TIER_STORE:
                tier.store(payload[0], payload[1])
            case CommandKind.TIER_LOAD:
                self._loads.append(tier.load(payload[0], payload[1]))
            case CommandKind.TIER_JOIN:
                tier.join(self._loads.popleft())
            case _:
                raise ValueError(f"command {kind!r} to a tier")

    @property
    def device_bytes(self) -> int:
        """What it holds of its device."""
        return self._memory.usage().device_bytes


class Follower:
    """Reads rank 0's commands one by one, and says of each that it began and how it ended."""

    def __init__(self, board: RankBoard, rank: int, waker: int) -> None:
        self._board = board
        self._rank = rank
        self._reader = CommandReader(board, rank, waker)
        self._refused = 0  # the last command that was

    def beat(self) -> None:
        """Says that something goes on."""
        self._board.beats_W[self._rank] += 1

    def read(self, kind: CommandKind, act: Callable[[list[Any]], Any]) -> Any:
        """Waits for the next command, which must be of this kind, and does it. Returns what `act` made of it."""
        command = self._next()
        if command.kind != kind:
            raise ValueError(f"command {command.kind!r} where {kind!r} was to come")
        result = act(msgspec.msgpack.decode(command.payload))
        self._board.ended_W[self._rank] = command.number
        return result

    def follow(self, model: FollowerModel) -> None:
        """Does command after command until CLOSE. Raises what a command does that could not be done."""
        board, rank = self._board, self._rank
        board.device_bytes_W[rank] = model.device_bytes
        while (command := self._next()).kind != CommandKind.CLOSE:
            if not self._takes_back_nothing(command):
                try:
                    model.apply(command)
                except tuple(REFUSALS.values()) as error:
                    if command.kind in COMPUTES:
                        raise  # the others compute it
                    self._refused = command.number
                    board.fail(rank, command.number, f"{type(error).__name__}: {error}")
            if command.kind == CommandKind.LAUNCH:
                board.steps_W[rank] += 1
            elif command.kind in _CHANGES_MEMORY:
                board.device_bytes_W[rank] = model.device_bytes
            board.ended_W[rank] = command.number
        board.ended_W[rank] = command.number

    def _next(self) -> Command:
        command = self._reader.next()
        self._board.began_W[self._rank] = command.number
        return command

    def _takes_back_nothing(self, command: Command) -> bool:
        """Whether a command takes back another one that was refused here."""
        if command.number != self._refused + 1 or command.kind in COMPUTES:
            return False
        payload = msgspec.msgpack.decode(command.payload)
        return bool(payload) and payload[-1] == self._refused
