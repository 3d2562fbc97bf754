"""KV blocks of a model of several ranks on their way to other replicas and back: what travels is a whole block, as one
process has it, and each rank has its own heads' part of it. So either side may have any number of ranks.

    out   each rank: pool → memory of its own → its part of a buffer │ rank 0, once all did: buffer → host memory
    in    rank 0: host memory → buffer │ each rank: its part of the buffer → memory of its own → pool

Bounce buffers are memory that the ranks share, used in turns; each is zeroed before its next turn. Rank 0 says which
blocks go and come, in the order of the steps. It knows no sequences, no replicas and no sockets.

N buffers, W ranks, B blocks of a buffer, L layers, T tokens of a block, 2 for K and V, H bytes of a rank's heads.
"""

import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Final

import numpy as np

from engine.execution.memory_plan import BOUNCE_BYTES
from engine.kvcache.tensors import KVShape
from engine.ranks.board import BOUNCES, RankBoard
from engine.ranks.command_ring import CommandKind
from engine.ranks.leader import REFUSALS, RankCommand, RankCommands
from engine.step.exchange import BlockExchange, Gathering, GatheringLost

_NAP_S: Final = 100e-6


class RankBlocks:
    """One rank's side. A turn is a number from 1 on; its buffer is turn % BOUNCES.

    thread  does what waits for the rank's device, in its order.
    """

    def __init__(
        self, board: RankBoard, rank: int, shape: KVShape, local: BlockExchange,
        attach: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        """`local` has the rank's own part of each block, of this shape; `attach` is what threads begin with that wait
        for its device."""
        self.block_bytes = board.ranks * shape.block_bytes
        assert self.block_bytes <= len(board.bounces[0]), "a block is more than a buffer"
        self.bounce_blocks = max(1, BOUNCE_BYTES // self.block_bytes)
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="blocks", initializer=attach)
        self._board = board
        self._rank = rank
        self._local = local
        part = (self.bounce_blocks, shape.layers, shape.block_tokens, 2)
        heads_bytes = shape.kv_heads * shape.head_dim * shape.dtype.itemsize
        self._parts_BLT2H = [
            np.frombuffer(buffer, np.uint8, self.bounce_blocks * self.block_bytes).reshape(
                *part, board.ranks, heads_bytes
            )[..., rank, :]
            for buffer in board.bounces
        ]
        self._own_BLT2H = [np.zeros((*part, heads_bytes), np.uint8) for _ in board.bounces]

    def gather(self, turn: int, blocks: Items[int]) -> None:
        """Begins to copy blocks into the turn's buffer, before any step that is launched later changes them."""
        own = self._own_BLT2H[turn % BOUNCES][: len(blocks)]
        try:
            gathering = self._local.gather(blocks, own.reshape(-1).data)
        except tuple(REFUSALS.values()):
            self._note_refused(turn)
            return
        self.thread.submit(self._give, turn, len(blocks), gathering)

    def scatter(self, turn: int, blocks: Items[int]) -> None:
        """Copies the turn's buffer into blocks, before any step that is launched later. None may refuse it."""
        own = self._own_BLT2H[turn % BOUNCES][: len(blocks)]
        own[:] = self._parts_BLT2H[turn % BOUNCES][: len(blocks)]
        try:
            self._local.scatter(blocks, own.reshape(-1).data)
        except tuple(REFUSALS.values()) as error:
            raise RuntimeError(f"no memory for blocks that came from another replica: {error}") from error
        own[:] = 0
        self._note_copied(turn)

    def close(self) -> None:
        """Waits until nothing is on its way."""
        self.thread.shutdown()

    def check(self) -> None:
        """Raises AssertionError where something is left of blocks, while none is on its way."""
        for memory in (*self._own_BLT2H, *self._parts_BLT2H):
            assert not memory.any(), "what travelled is not erased"

    def _give(self, turn: int, count: int, gathering: Gathering) -> None:
        try:
            gathering.wait()
            own = self._own_BLT2H[turn % BOUNCES][:count]
            self._parts_BLT2H[turn % BOUNCES][:count] = own
            own[:] = 0
            self._note_copied(turn)
        except BaseException as error:
            self._board.fail(self._rank, -1, repr(error))
            self._board.abort(self._rank)
            raise

    def _note_copied(self, turn: int) -> None:
        self._board.copied_NW[turn % BOUNCES, self._rank] = turn

    def _note_refused(self, turn: int) -> None:
        self._board.copied_NW[turn % BOUNCES, self._rank] = -turn


class RankedGathering:
    """Blocks on their way out of the pools of all ranks."""

    took_us = 0

    def __init__(self, parts: Items["Future[None]"]) -> None:
        self._parts = parts

    def wait(self) -> list[int]:
        """As in Gathering. Nothing writes to their memory any more then, though some are lost."""
        for loss in [part.exception() for part in self._parts]:
            if loss is not None:
                raise loss
        return []


class RankedExchange:
    """A BlockExchange of several ranks, as rank 0 has it. Blocks go through the host's memory alone."""

    windows = None

    def __init__(self, own: RankBlocks, commands: RankCommands) -> None:
        self._own = own
        self._commands = commands
        self._board = commands.group.board
        self._turn = 0
        self._turns: list[Future[None] | None] = [None] * BOUNCES  # the last of each buffer
        self._closing = False

    @property
    def busy(self) -> bool:
        """As in BlockExchange: while some rank has not done its part of what the next buffer was used for last."""
        before = self._turns[(self._turn + 1) % BOUNCES]
        return before is not None and not before.done()

    def gather(self, blocks: Items[int], into: memoryview) -> RankedGathering:
        """As in BlockExchange."""
        parts = list[Future[None]]()
        for some, start, end in self._pieces(blocks):
            turn = self._next_turn()
            act = partial(self._own.gather, turn, some)
            self._commands.do(RankCommand(CommandKind.GATHER, (turn, some), act))
            parts.append(self._begin(turn, end - start, into[start:end]))
        return RankedGathering(parts)

    def scatter(self, blocks: Items[int], gathered: memoryview) -> None:
        """As in BlockExchange."""
        for some, start, end in self._pieces(blocks):
            turn = self._next_turn()
            self._bounce(turn, end - start)[:] = np.frombuffer(gathered[start:end], np.uint8)
            act = partial(self._own.scatter, turn, some)
            self._commands.do(RankCommand(CommandKind.SCATTER, (turn, some), act))
            self._begin(turn, end - start, None)

    def close(self) -> None:
        """Gives up what is on its way."""
        self._closing = True
        self._own.close()

    def check(self) -> None:
        """Waits for what is on its way. Raises AssertionError where something is left of it."""
        for turn in self._turns:
            if turn is not None:
                turn.exception()
        self._own.check()

    def _pieces(self, blocks: Items[int]) -> list[tuple[list[int], int, int]]:
        """As many blocks as a buffer holds, and where their bytes are, start … end−1."""
        most, size = self._own.bounce_blocks, self._own.block_bytes
        pieces = [(first, [*blocks[first : first + most]]) for first in range(0, len(blocks), most)]
        return [(some, first * size, (first + len(some)) * size) for first, some in pieces]

    def _next_turn(self) -> int:
        """The next turn, once its buffer is free: every rank does its part by itself. Raises RankLost."""
        while self.busy:
            self._commands.group.look()  # threads may be late where no rank is silent
            time.sleep(_NAP_S)
        self._turn += 1
        return self._turn

    def _begin(self, turn: int, size: int, into: memoryview | None) -> "Future[None]":
        future = self._own.thread.submit(self._end, turn, size, into)
        self._turns[turn % BOUNCES] = future
        return future

    def _end(self, turn: int, size: int, into: memoryview | None) -> None:
        """Waits until all ranks have done their part of a turn, takes what they gathered and zeroes the buffer. Raises
        GatheringLost."""
        copied_W, buffer = self._board.copied_NW[turn % BOUNCES], self._bounce(turn, size)
        while not (abs(copied_W) == turn).all():
            if self._board.aborted or self._closing:
                raise GatheringLost("a rank that has a part of the blocks is lost, or all of them end")
            time.sleep(_NAP_S)
        whole = bool((copied_W > 0).all())
        if into is not None and whole:
            np.frombuffer(into, np.uint8)[:] = buffer
        buffer[:] = 0
        if not whole:
            raise GatheringLost(f"rank {int(copied_W.argmin())} has no memory for blocks on their way")

    def _bounce(self, turn: int, size: int) -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
        return np.frombuffer(self._board.bounces[turn % BOUNCES], np.uint8, size)
