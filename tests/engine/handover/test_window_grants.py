"""Windows over real sockets, both sides in one process: what is granted, who gives it back when, and what is found of
it then."""

import contextlib
import secrets
import time
from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine.handover.channel import HandoverLost, MessageChannel
from engine.handover.dial import dial
from engine.handover.messages import (
    HANDOVER_VERSION,
    HandoverBeat,
    HandoverFault,
    HandoverGrant,
    HandoverOffer,
    HandoverRefusal,
    WindowAnswer,
    handover_id,
)
from engine.handover.receiver import BlockFormat, HandoverReceiver
from engine.handover.sender import HandoverPlan, HandoverState, OutgoingHandover
from engine.handover.staging import StagingArea
from engine.kvcache.tensors import KVPool, KVShape
from engine.protocol.connection import listen
from engine.step.exchange import BlockWindow
from prefixcache.names import BlockNames, next_name
from prefixcache.namespace import Namespace
from tests.support.waiting import wait_for
from tests.support.window_replica import Faults, windowed

SIZE, COUNT = 4, 5
SHAPE = KVShape(layers=2, kv_heads=1, head_dim=8, block_tokens=SIZE, dtype=torch.float32)
FORMAT = BlockFormat("7", "m", "r", "kv", SHAPE.block_bytes)
SPACE = Namespace("r", "", "r", "kv", SIZE, 2, b"t" * 16, 0)
TOKENS = array("I", range(100, 100 + COUNT * SIZE + 1))


def filled_pool() -> KVPool:
    pool = KVPool(SHAPE, 16)
    for rows in pool.layers:
        rows[: 16 * SIZE].normal_()
    return pool


class Sides:
    """A pool that blocks leave and one that they come to, with windows over each."""

    def __init__(self, folder: Path, out: Faults, into: Faults, host_bytes: int, lease_s: float) -> None:
        self.source, self.target = filled_pool(), filled_pool()
        self.out, self.into = windowed(self.source, out), windowed(self.target, into)
        self.area = StagingArea(host_bytes, lambda: 0.0, windows=self.into.windows)
        self.address = f"unix:{folder / 'kv.sock'}"
        self.receiver = HandoverReceiver(listen(self.address), self.area, FORMAT, lease_s)
        self.lease_s = lease_s

    def sender(self, key: bytes) -> OutgoingHandover:
        plan = HandoverPlan(self.address, "7", key, COUNT)
        return OutgoingHandover(plan, FORMAT, dial, lambda: None, self.lease_s, self.out.windows)

    def push(self, sender: OutgoingHandover, key: bytes, blocks: list[int]) -> None:
        """Pushes these blocks as the first ones of TOKENS."""
        names, name, packed = [], BlockNames(key).root(SPACE), memoryview(TOKENS).cast("B")
        for at in range(len(blocks)):
            name = next_name(name, packed[at * SIZE * 4 : (at + 1) * SIZE * 4])
            names.append(name)
        piece = wait_for(lambda: sender.piece(len(blocks)) or sender.ended)
        assert not sender.ended, sender.problem
        piece.fill(self.out, blocks)
        sender.push(names, piece)

    def offered(self, channel: MessageChannel, kind: str = "host", key: bytes = b"k" * 32) -> HandoverGrant:
        channel.send(
            HandoverOffer(
                HANDOVER_VERSION, handover_id(key), "7", "m", "r", "kv", SHAPE.block_bytes, COUNT, True, [], kind
            )
        )
        return channel.receive(HandoverGrant)

    def holds_nothing(self) -> None:
        wait_for(lambda: not self.receiver.connections and not self.area.held)
        wait_for(lambda: self.into.windows.held_bytes == 0)
        assert self.area.held_bytes == 0
        self.area.check()


def open_sides(
    folder: Path, out: Faults | None = None, into: Faults | None = None, host_bytes: int = 1 << 20, lease_s: float = 5.0
) -> Sides:
    return Sides(folder, out or Faults(), into or Faults(), host_bytes, lease_s)


@pytest.fixture
def sides(tmp_path: Path) -> Iterator[Sides]:
    sides = open_sides(tmp_path)
    yield sides
    sides.receiver.close()
    sides.area.close()


BLOCKS = [3, 1, 15, 0, 7]


def sealed(sides: Sides, key: bytes) -> OutgoingHandover:
    sender = sides.sender(key)
    sides.push(sender, key, BLOCKS)
    sender.seal()
    wait_for(lambda: sender.ended)
    assert sender.state is HandoverState.SEALED, sender.problem
    return sender


@pytest.mark.parametrize(
    ("out", "into", "in_window"),
    [(Faults(), Faults(), True), (Faults(reaches=False), Faults(), False), (Faults(), Faults(windows_bytes=0), False)],
    ids=["window", "out of reach", "no room"],
)
def test_blocks_come_by_what_there_is(tmp_path: Path, out: Faults, into: Faults, in_window: bool) -> None:
    sides, key = open_sides(tmp_path, out, into), secrets.token_bytes(32)
    sender = sealed(sides, key)
    assert (sender.in_window, sender.whole) == (in_window, COUNT)
    staged = sides.area.claim(key, SPACE, TOKENS)
    assert staged is not None
    assert (staged.memory.in_window, staged.whole) == (in_window, COUNT)
    assert bool(sides.area.held_bytes) != in_window
    staged.memory.scatter(sides.into, 1, [10, 12, 11])
    staged.release()
    assert torch.equal(sides.target.words_LNW[:, [10, 12, 11]], sides.source.words_LNW[:, BLOCKS[1:4]])
    sides.holds_nothing()
    assert sides.out.windows.held_bytes == 0
    sides.receiver.close()
    sides.area.close()


@pytest.mark.parametrize("kind", ["", "cuda"])
def test_a_sender_of_another_kind_is_granted_host_memory(sides: Sides, kind: str) -> None:
    with MessageChannel(dial(sides.address), 5.0) as channel:
        grant = sides.offered(channel, kind)
        assert (grant.shared, grant.window) == (True, False)
    sides.holds_nothing()


def test_blocks_from_the_first_corrupt_one_on_are_not_found(tmp_path: Path) -> None:
    sides, key = open_sides(tmp_path, Faults(corrupt=1)), secrets.token_bytes(32)
    sender = sealed(sides, key)
    assert sender.whole == COUNT // 2, "the one in the middle is another one there"
    assert sides.area.counters["corrupt_blocks"] == COUNT - COUNT // 2
    staged = sides.area.claim(key, SPACE, TOKENS)
    assert staged is not None
    assert staged.whole == COUNT // 2
    staged.release()
    sides.holds_nothing()
    sides.receiver.close()
    sides.area.close()


def test_no_window_is_held_for_a_sender_that_falls_silent_or_goes(tmp_path: Path) -> None:
    sides = open_sides(tmp_path, lease_s=0.2)
    with MessageChannel(dial(sides.address), 5.0) as channel:
        assert sides.offered(channel).window
        channel.receive_descriptor()
        assert sides.into.windows.held_bytes > 0
        sides.holds_nothing()
    with MessageChannel(dial(sides.address), 5.0) as channel:
        assert sides.offered(channel).window
    sides.holds_nothing()
    sender, key = sides.sender(b"k" * 32), b"k" * 32
    sides.push(sender, key, BLOCKS[:2])
    sender.abort()
    sides.holds_nothing()
    sides.receiver.close()
    sides.area.close()


def test_a_sender_that_reaches_no_window_may_find_host_memory_full(tmp_path: Path) -> None:
    sides = open_sides(tmp_path, Faults(reaches=False), host_bytes=10)
    sender = sides.sender(b"k" * 32)
    wait_for(lambda: sender.ended)
    assert sender.state is HandoverState.FAILED
    assert "refused (full)" in sender.problem
    sides.holds_nothing()
    sides.receiver.close()
    sides.area.close()


def test_a_model_that_sleeps_gives_the_device_its_memory_back(sides: Sides) -> None:
    """What waits, what was claimed, and what still comes."""
    keys = [secrets.token_bytes(32) for _ in range(3)]
    for key in keys[:2]:
        sealed(sides, key)
    claimed = sides.area.claim(keys[0], SPACE, TOKENS)
    assert claimed is not None
    coming = sides.sender(keys[2])
    sides.push(coming, keys[2], BLOCKS[:2])
    sides.area.release_windows()
    assert claimed.whole == 0, "nothing of it is read"
    assert sides.area.claim(keys[1], SPACE, TOKENS) is None
    sides.push(coming, keys[2], BLOCKS[:1])
    wait_for(lambda: coming.ended)
    assert coming.state is HandoverState.FAILED
    claimed.release()
    sides.holds_nothing()


def test_a_window_that_is_made_while_the_model_falls_asleep_is_given_back(
    sides: Sides, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = sides.into.windows.make

    def made_meanwhile(blocks: int) -> BlockWindow:
        window = make(blocks)
        sides.area.release_windows()
        return window

    monkeypatch.setattr(sides.into.windows, "make", made_meanwhile)
    sender = sides.sender(secrets.token_bytes(32))
    wait_for(lambda: sender.ended)
    assert "the device's memory is wanted back" in sender.problem
    sides.holds_nothing()


def test_windows_whose_senders_ended_are_waited_for_all_at_once(sides: Sides) -> None:
    staged = [sides.area.open(bytes([number]) * 16, SHAPE.block_bytes, 1, True, "host") for number in range(30)]
    began_s = time.monotonic()
    for each in staged:
        each.release()
    sides.holds_nothing()
    assert time.monotonic() - began_s < 1.5, "one after the other they take 3 s"


def test_what_is_pushed_to_a_handover_that_has_just_ended_is_waited_for(sides: Sides) -> None:
    sender = sides.sender(secrets.token_bytes(32))
    piece = wait_for(lambda: sender.piece(1))
    sender.abort()
    sender.wait_ended(5.0)
    waited: list[bool] = []

    class Late:
        took_us = 0

        def fill(self, exchange: object, blocks: object) -> None: ...

        def checksums(self) -> list[int]:
            waited.append(True)
            return []

    assert piece is not None
    sender.push([b"n" * 32], Late())
    assert waited == [True]


def test_an_answer_out_of_place_ends_the_handover(sides: Sides) -> None:
    for first, second in ((HandoverBeat(), HandoverBeat()), (WindowAnswer(True), WindowAnswer(True))):
        with MessageChannel(dial(sides.address), 5.0) as channel:
            assert sides.offered(channel).window
            channel.receive_descriptor()
            channel.send(first)
            with contextlib.suppress(HandoverLost):
                channel.send(second)
            with pytest.raises(HandoverLost):
                channel.receive(HandoverGrant)
        sides.holds_nothing()


def test_an_id_that_is_held_makes_no_second_window(sides: Sides) -> None:
    with MessageChannel(dial(sides.address), 5.0) as first, MessageChannel(dial(sides.address), 5.0) as second:
        assert sides.offered(first).window
        held = sides.into.windows.held_bytes
        offer = HandoverOffer(
            HANDOVER_VERSION, handover_id(b"k" * 32), "7", "m", "r", "kv", SHAPE.block_bytes, COUNT, True, [], "host"
        )
        second.send(offer)
        assert second.receive(HandoverRefusal).fault is HandoverFault.INVALID
        assert sides.into.windows.held_bytes == held
    sides.holds_nothing()
