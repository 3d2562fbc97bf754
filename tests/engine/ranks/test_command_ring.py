"""engine/ranks/command_ring.py: every command arrives once, in order and as it was written, however often round."""

import os
import random
import struct
from unittest.mock import Mock

import pytest

from engine.memory.errors import OutOfDeviceMemory
from engine.protocol.specs import ModelSpec
from engine.ranks import fork
from engine.ranks.board import RankBoard
from engine.ranks.command_ring import CommandKind, CommandReader, CommandWriter, DamagedCommand, ring_bytes


def ring(
    followers: int = 2, size: int = 1024, usual: int = 1024
) -> tuple[RankBoard, CommandWriter, list[CommandReader]]:
    board = RankBoard(1 + followers, size, 8)
    wakers = [os.eventfd(0, os.EFD_CLOEXEC) for _ in range(followers)]
    readers = [CommandReader(board, 1 + n, waker) for n, waker in enumerate(wakers)]
    return board, CommandWriter(board, wakers, usual), readers


@pytest.mark.parametrize("seed", range(20))
def test_commands_arrive_in_order_whatever_their_sizes_and_who_is_slow(seed: int) -> None:
    pick = random.Random(seed)
    board, writer, readers = ring(usual=pick.choice((128, 512, 1024)))
    written: list[tuple[int, CommandKind, bytes]] = []
    read: list[list[tuple[int, CommandKind, bytes]]] = [[] for _ in readers]

    def read_one(which: int) -> None:
        command = readers[which].next()
        read[which].append((command.number, command.kind, command.payload))

    def wait(done: object) -> None:
        assert callable(done)
        while not done():
            read_one(min(range(len(readers)), key=lambda which: len(read[which])))

    for _ in range(300):
        kind, payload = pick.choice(list(CommandKind)), pick.randbytes(pick.choice((0, 1, 7, 8, 100, 460)))
        written.append((writer.publish(kind, payload, wait), kind, payload))
        for which in range(len(readers)):
            while len(read[which]) < len(written) and pick.random() < 0.5:
                read_one(which)
    for which in range(len(readers)):
        while len(read[which]) < len(written):
            read_one(which)
    assert read == [written] * len(readers)
    assert [number for number, _, _ in written] == list(range(1, 301))
    assert board.published == 300


def test_a_damaged_command_is_not_done() -> None:
    board, writer, (reader,) = ring(1)
    writer.publish(CommandKind.ZERO, b"blocks 1, 2, 3", lambda _: None)
    board.ring[34] ^= 1
    with pytest.raises(DamagedCommand, match="otherwise than it was written"):
        reader.next()


def test_a_missed_command_is_noticed() -> None:
    board, writer, (reader,) = ring(1)
    writer.publish(CommandKind.ZERO, b"", lambda _: None)
    board.ring[:8] = struct.pack("<q", 2)
    with pytest.raises(DamagedCommand, match="looked for command 1 and read 2"):
        reader.next()


def test_a_command_larger_than_half_the_ring_is_refused_and_nothing_is_said() -> None:
    board, writer, _ = ring(1)
    with pytest.raises(OutOfDeviceMemory, match="a command of 1000 bytes"):
        writer.publish(CommandKind.LAUNCH, bytes(1000), lambda _: None)
    assert board.published == 0


def test_a_ring_takes_the_widest_tables_and_leaves_what_it_has_for_them_untouched() -> None:
    words = 5 << 20  # a sequence of a million tokens among eighty
    board, writer, (reader,) = ring(1, ring_bytes(words), usual=1 << 12)
    for _ in range(400):
        writer.publish(CommandKind.LAUNCH, bytes(range(256)), lambda _: None)
        assert reader.next().payload == bytes(range(256))
    assert not any(board.ring[1 << 13 : 1 << 20])
    large = bytes(4 * words)
    writer.publish(CommandKind.LAUNCH, large, lambda _: None)
    assert reader.next().payload == large


def test_ranks_have_a_ring_for_their_longest_context_in_each_group_of_layers() -> None:
    model, config = ModelSpec(name="m", folder="", sequences=80), Mock(context_tokens=1 << 20, kv_groups=("", "chunk"))
    assert fork._table_words(model, config, 512) == 2 * 80 * (1 << 16)
