"""The receiving side over real sockets: what a sender may do wrong, and what is held afterwards: nothing."""

import contextlib
import random
import secrets
import socket
import struct
import threading
from array import array
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import xxhash

from engine.handover.channel import HandoverLost, MessageChannel
from engine.handover.dial import dial
from engine.handover.messages import (
    HANDOVER_VERSION,
    BlockRun,
    BlocksTaken,
    HandoverBeat,
    HandoverError,
    HandoverFault,
    HandoverGrant,
    HandoverOffer,
    HandoverRefusal,
    HandoverSeal,
    HandoverSealed,
    Message,
    encode_message,
    handover_id,
)
from engine.handover.receiver import BlockFormat, HandoverReceiver
from engine.handover.sender import HandoverPlan, HandoverState, OutgoingHandover
from engine.handover.staged_memory import HostMemory
from engine.handover.staging import CLAIM_S, StagedPrefix, StagingArea
from engine.handover.transport import PIECES, HostPiece
from engine.protocol.connection import listen
from prefixcache.names import BlockNames, next_name
from prefixcache.namespace import Namespace
from tests.support.waiting import wait_for

SIZE, BLOCK_BYTES = 4, 64
FORMAT = BlockFormat("7", "m", "r", "kv", BLOCK_BYTES, "eu")
SPACE = Namespace("r", "", "r", "kv", SIZE, 2, b"t" * 16, 0)
TOKENS = array("I", range(100, 100 + 4 * SIZE + 1))


class Side:
    """A receiver, its clock and where it listens."""

    def __init__(self, folder: Path, max_bytes: int = 1 << 20, lease_s: float = 5.0, **area: bool) -> None:
        self.seconds = 0.0
        self.area = StagingArea(max_bytes, lambda: self.seconds, **area)
        self.address = f"unix:{folder / 'kv.sock'}"
        self.receiver = HandoverReceiver(listen(self.address), self.area, FORMAT, lease_s)

    def channel(self) -> MessageChannel:
        return MessageChannel(dial(self.address), 10.0)

    def holds_nothing(self) -> None:
        wait_for(lambda: not self.receiver.connections and not self.area.held)
        assert self.area.held_bytes == 0
        self.area.check()


def host_memory(staged: StagedPrefix) -> HostMemory:
    assert isinstance(staged.memory, HostMemory)
    return staged.memory


@pytest.fixture
def side(tmp_path: Path) -> Iterator[Side]:
    side = Side(tmp_path)
    yield side
    side.receiver.close()


def names_of(key: bytes, tokens: "array[int]" = TOKENS, space: Namespace = SPACE) -> list[bytes]:
    name, names, packed = BlockNames(key).root(space), [], memoryview(tokens).cast("B")
    for start in range(0, (len(tokens) - 1) // SIZE * SIZE * 4, SIZE * 4):
        name = next_name(name, packed[start : start + SIZE * 4])
        names.append(name)
    return names


def offer(key: bytes, blocks: int = 4, **changes: object) -> HandoverOffer:
    fields = {
        "version": HANDOVER_VERSION, "id": handover_id(key), "boot": "7", "model": "m", "revision": "r",
        "layout": "kv", "block_bytes": BLOCK_BYTES, "blocks": blocks,
    }  # fmt: skip
    return HandoverOffer(**fields | changes)  # type: ignore[arg-type]


def run(names: list[bytes], first: int, blocks: list[bytes]) -> bytes:
    sums = [xxhash.xxh3_64_intdigest(block) for block in blocks]
    return encode_message(BlockRun(first, b"".join(names[first : first + len(blocks)]), sums)) + b"".join(blocks)


def hand_over(side: Side, key: bytes, blocks: list[bytes]) -> int:
    """Pushes blocks over the socket, as a sender does. Returns how many are whole there."""
    names = names_of(key)
    with side.channel() as channel:
        channel.send(offer(key, len(blocks)))
        assert not channel.receive(HandoverGrant).shared
        channel._socket.sendall(run(names, 0, blocks[:1]) + run(names, 1, blocks[1:]))
        assert channel.receive(BlocksTaken).blocks == 1
        assert channel.receive(BlocksTaken).blocks == len(blocks)
        channel.send(HandoverSeal(len(blocks)))
        return channel.receive(HandoverSealed).whole


def some_blocks(count: int = 4) -> list[bytes]:
    return [bytes([block + 1]) * BLOCK_BYTES for block in range(count)]


def test_blocks_are_claimed_once_by_key_namespace_and_tokens(side: Side) -> None:
    key, blocks = secrets.token_bytes(32), some_blocks()
    assert hand_over(side, key, blocks) == 4
    other = TOKENS[:]
    other[0] += 1
    assert side.area.claim(secrets.token_bytes(32), SPACE, TOKENS) is None
    assert side.area.claim(key, SPACE._replace(scope_id=b"u" * 16), TOKENS) is None, "another tenant"
    assert side.area.claim(key, SPACE._replace(epoch=1), TOKENS) is None, "a raised epoch"
    assert side.area.claim(key, SPACE._replace(adapter_revision="lora"), TOKENS) is None
    assert side.area.claim(key, SPACE, other) is None
    staged = side.area.claim(key, SPACE, TOKENS)
    assert staged is not None
    assert staged.whole == 4
    with host_memory(staged).view(0, 4) as view:
        assert bytes(view) == b"".join(blocks)
    assert side.area.claim(key, SPACE, TOKENS) is None, "for the second time"
    assert side.area.counters["foreign"] == 4
    staged.release()
    staged.release()
    side.holds_nothing()


def test_only_blocks_before_the_first_difference_are_found(side: Side) -> None:
    key = secrets.token_bytes(32)
    hand_over(side, key, some_blocks())
    shorter = TOKENS[: 2 * SIZE + 3]
    staged = side.area.claim(key, SPACE, shorter)
    assert staged is not None
    assert staged.whole == 2
    staged.release()


def test_the_last_token_is_in_no_block_that_is_found(side: Side) -> None:
    key = secrets.token_bytes(32)
    hand_over(side, key, some_blocks())
    staged = side.area.claim(key, SPACE, TOKENS[: 2 * SIZE])
    assert staged is not None
    assert staged.whole == 1
    staged.release()


def test_a_lease_that_lapses_gives_everything_back(side: Side) -> None:
    key, late = secrets.token_bytes(32), secrets.token_bytes(32)
    hand_over(side, key, some_blocks())
    hand_over(side, late, some_blocks())
    assert side.area.claim(late, SPACE, TOKENS) is not None
    side.seconds = CLAIM_S - 0.1
    assert side.area.sweep() == []
    side.seconds = CLAIM_S
    assert side.area.claim(key, SPACE, TOKENS) is None, "its time is over before anybody sweeps"
    assert {*side.area.sweep()} == {handover_id(key), handover_id(late)}
    assert side.area.counters["lapsed"] == 2
    side.holds_nothing()


def test_a_purge_takes_what_waits_and_what_still_comes(side: Side) -> None:
    waits, comes = secrets.token_bytes(32), secrets.token_bytes(32)
    hand_over(side, waits, some_blocks())
    with side.channel() as channel:
        channel.send(offer(comes))
        channel.receive(HandoverGrant)
        side.area.purge()
        assert side.area.claim(waits, SPACE, TOKENS) is None
        assert side.area.sweep() == [handover_id(waits)]
        channel._socket.sendall(run(names_of(comes), 0, some_blocks()))
        channel.send(HandoverSeal(4))
        channel.receive(BlocksTaken)
        channel.receive(HandoverSealed)
    assert side.area.claim(comes, SPACE, TOKENS) is None
    assert side.area.sweep() == [handover_id(comes)]
    side.holds_nothing()


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"version": 2}, HandoverFault.VERSION),
        ({"boot": "6"}, HandoverFault.BOOT),
        ({"model": "n"}, HandoverFault.MODEL),
        ({"revision": "s"}, HandoverFault.REVISION),
        ({"layout": "kv-fp8"}, HandoverFault.LAYOUT),
        ({"block_bytes": 32}, HandoverFault.LAYOUT),
        ({"blocks": 0}, HandoverFault.INVALID),
        ({"blocks": -1}, HandoverFault.INVALID),
        ({"id": b"short"}, HandoverFault.INVALID),
        ({"blocks": 1 << 40}, HandoverFault.FULL),
    ],
)
def test_an_offer_of_something_else_is_refused_by_name(
    side: Side, changes: dict[str, object], fault: HandoverFault
) -> None:
    with side.channel() as channel:
        channel.send(offer(secrets.token_bytes(32), **changes))
        refusal = channel.receive(HandoverRefusal)
    assert refusal.fault is fault
    side.holds_nothing()


def test_no_more_is_held_than_the_limit(tmp_path: Path) -> None:
    side = Side(tmp_path, max_bytes=6 * BLOCK_BYTES)
    hand_over(side, secrets.token_bytes(32), some_blocks())
    with side.channel() as channel:
        channel.send(offer(secrets.token_bytes(32)))
        assert channel.receive(HandoverRefusal).fault is HandoverFault.FULL
    assert side.area.held_bytes == 4 * BLOCK_BYTES
    side.receiver.close()


def test_an_id_that_is_held_is_refused(side: Side) -> None:
    key = secrets.token_bytes(32)
    hand_over(side, key, some_blocks())
    with side.channel() as channel:
        channel.send(offer(key))
        assert channel.receive(HandoverRefusal).fault is HandoverFault.INVALID
    assert side.area.held == 1


@pytest.mark.parametrize("corrupt", [0, 1, 3])
def test_blocks_from_the_first_corrupt_one_on_are_not_found(side: Side, corrupt: int) -> None:
    key, blocks = secrets.token_bytes(32), some_blocks()
    names = names_of(key)
    sent = run(names, 0, blocks[:2]), run(names, 2, blocks[2:])
    whole = bytearray(sent[corrupt // 2])
    whole[-1 - BLOCK_BYTES * (1 - corrupt % 2)] ^= 4
    with side.channel() as channel:
        channel.send(offer(key))
        channel.receive(HandoverGrant)
        channel._socket.sendall(b"".join([whole if at == corrupt // 2 else each for at, each in enumerate(sent)]))
        channel.send(HandoverSeal(4))
        while not isinstance(answer := channel.receive(BlocksTaken, HandoverSealed), HandoverSealed):
            pass
    assert answer.whole == corrupt
    staged = side.area.claim(key, SPACE, TOKENS)
    assert (0 if staged is None else staged.whole) == corrupt
    assert side.area.counters["corrupt_blocks"] == 2 - corrupt % 2


WRONG: list[list[Message]] = [
    [HandoverSealed(1)],
    [HandoverOffer(HANDOVER_VERSION, b"i" * 16, "7", "m", "r", "kv", BLOCK_BYTES, 4)] * 2,
    [HandoverSeal(1)],
    [BlockRun(1, b"n" * 32, [1])],
    [BlockRun(0, b"n" * 32 * 5, [1] * 5)],
    [BlockRun(0, b"n" * 33, [1])],
    [BlockRun(0, b"", [])],
    [BlockRun(-1, b"n" * 32, [1])],
    [HandoverBeat(), HandoverGrant(1)],
]


@pytest.mark.parametrize("messages", WRONG, ids=range(len(WRONG)))
def test_messages_out_of_place_end_the_handover(side: Side, messages: list[Message]) -> None:
    with side.channel() as channel:
        channel.send(offer(secrets.token_bytes(32)))
        channel.receive(HandoverGrant)
        with contextlib.suppress(HandoverLost):
            for message in messages:
                channel.send(message)
        with pytest.raises(HandoverLost):
            channel.receive(BlocksTaken)
    side.holds_nothing()


def test_rubbish_of_any_kind_leaves_nothing_and_the_receiver_goes_on(side: Side) -> None:
    rng = random.Random(7)
    key = secrets.token_bytes(32)
    good = encode_message(offer(key)) + run(names_of(key), 0, some_blocks()) + encode_message(HandoverSeal(4))
    for _ in range(200):
        bad = bytearray(good[: rng.randrange(len(good))])
        for _ in range(rng.randrange(6)):
            if bad:
                bad[rng.randrange(len(bad))] = rng.randrange(256)
        bad += rng.choice([b"", struct.pack(">I", rng.randrange(1 << 32)), rng.randbytes(40)])
        with dial(side.address) as peer:
            peer.sendall(bad)
            peer.shutdown(socket.SHUT_WR)
            peer.settimeout(5)
            with contextlib.suppress(ConnectionError):
                while peer.recv(4096):
                    pass
        wait_for(lambda: not side.receiver.connections)
        side.seconds += 2 * CLAIM_S  # a seal that came through by chance is swept
        side.area.sweep()
    side.holds_nothing()
    assert hand_over(side, secrets.token_bytes(32), some_blocks()) == 4


def test_a_sender_that_falls_silent_loses_its_lease(tmp_path: Path) -> None:
    side = Side(tmp_path, lease_s=0.05)
    with side.channel() as channel:
        channel.send(offer(secrets.token_bytes(32)))
        assert channel.receive(HandoverGrant).lease_ms == 50
        side.holds_nothing()
    side.receiver.close()


# The sender's side against it


def outgoing(address: str, key: bytes, lease_s: float = 5.0, blocks: int = 4) -> OutgoingHandover:
    return OutgoingHandover(HandoverPlan(address, "7", key, blocks), FORMAT, dial, lambda: None, lease_s)


@pytest.mark.parametrize("shared", [True, False])
def test_both_transports_carry_the_same(tmp_path: Path, shared: bool) -> None:
    side, key, blocks = Side(tmp_path, shares_memory=shared), secrets.token_bytes(32), some_blocks()
    names, sender = names_of(key), outgoing(side.address, key)
    for at in range(4):
        piece = wait_for(lambda: sender.piece(1))
        assert isinstance(piece, HostPiece)
        piece.view[:] = blocks[at]
        sender.push([names[at]], piece)
    sender.seal()
    wait_for(lambda: sender.ended)
    assert (sender.state, sender.whole) == (HandoverState.SEALED, 4)
    staged = side.area.claim(key, SPACE, TOKENS)
    assert staged is not None
    assert (staged.memory.descriptor is not None) == shared
    with host_memory(staged).view(0, 4) as view:
        assert bytes(view) == b"".join(blocks)
    staged.release()
    side.holds_nothing()
    side.receiver.close()


def test_a_receiver_that_stops_reading_costs_no_more_than_the_pieces(tmp_path: Path) -> None:
    with listen(f"unix:{tmp_path / 'kv.sock'}") as listener:
        listener.setblocking(True)
        size = 1 << 18
        format = BlockFormat("7", "m", "r", "kv", size)
        plan = HandoverPlan(f"unix:{tmp_path / 'kv.sock'}", "7", secrets.token_bytes(32), 1000)
        sender = OutgoingHandover(plan, format, dial, lambda: None, lease_s=0.3)
        peer, _ = listener.accept()
        with peer, MessageChannel(peer, 5.0) as channel:
            channel.receive(HandoverOffer)
            channel.send(HandoverGrant(300))
            pushed = 0
            while not sender.ended and pushed < 1000:
                if (piece := sender.piece(sender.max_run)) is not None:
                    sender.push([b"n" * 32] * sender.max_run, piece)
                    pushed += sender.max_run
            assert pushed <= (PIECES + 3) * sender.max_run, "what the socket and the pieces hold"
            assert sender.state is HandoverState.FAILED
            assert "silent" in sender.problem or "took nothing" in sender.problem


@pytest.mark.parametrize("answer", [b"", b"\0\0\0\1\xc1", encode_message(HandoverSealed(3)), b"\xff" * 8])
def test_a_receiver_that_answers_rubbish_ends_the_handover(tmp_path: Path, answer: bytes) -> None:
    with listen(f"unix:{tmp_path / 'kv.sock'}") as listener:
        listener.setblocking(True)
        sender = outgoing(f"unix:{tmp_path / 'kv.sock'}", secrets.token_bytes(32))
        peer, _ = listener.accept()
        with peer:
            peer.sendall(answer)
            peer.shutdown(socket.SHUT_WR)
            wait_for(lambda: sender.ended)
    assert sender.state is HandoverState.FAILED
    assert sender.problem


def test_nobody_there_is_a_handover_that_failed(tmp_path: Path) -> None:
    sender = outgoing(f"unix:{tmp_path / 'nobody'}", secrets.token_bytes(32))
    wait_for(lambda: sender.ended)
    assert sender.state is HandoverState.FAILED


def test_what_is_copied_for_a_handover_that_has_ended_is_waited_for_beside_the_loop(tmp_path: Path) -> None:
    sender = outgoing(f"unix:{tmp_path / 'nobody'}", secrets.token_bytes(32))
    wait_for(lambda: sender.ended)
    copied, dropped = threading.Event(), threading.Event()

    class Copying:
        took_us = 0

        def wait(self) -> list[int]:
            copied.wait(10)
            dropped.set()
            return []

    exchange: Any = SimpleNamespace(gather=lambda *_: Copying())
    piece = HostPiece(memoryview(bytearray(BLOCK_BYTES)), BLOCK_BYTES)
    piece.fill(exchange, [0])
    sender.push([b"n" * 32], piece)
    assert not dropped.is_set()
    copied.set()
    sender.wait_ended(10)
    assert dropped.is_set()


@pytest.mark.parametrize(("regions", "taken"), [((), True), (("us", "eu"), True), (("us", "eu-2"), False)])
def test_what_may_not_go_to_its_region_is_refused_before_a_block_of_it_comes(
    side: Side, regions: tuple[str, ...], taken: bool
) -> None:
    sender = OutgoingHandover(
        HandoverPlan(side.address, "7", secrets.token_bytes(32), 4, regions), FORMAT, dial, lambda: None
    )
    wait_for(lambda: sender.state is not HandoverState.ASKING)
    assert (sender.state is HandoverState.MOVING) is taken
    assert taken or "refused (region): it may go to us, eu-2 alone, and here is 'eu'" in sender.problem
    sender.abort()
    side.holds_nothing()


def test_a_message_over_the_limit_is_refused_before_it_is_read(side: Side) -> None:
    with side.channel() as channel:
        channel._socket.sendall(struct.pack(">I", 1 << 30))
        with pytest.raises((HandoverLost, HandoverError)):
            channel.receive(HandoverGrant)
    side.holds_nothing()


def test_it_closes_while_a_connection_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread of a connection that has just come may not have started yet."""
    coming, released = threading.Event(), threading.Event()

    class Late(threading.Thread):
        def start(self) -> None:
            if self.name == "handover":
                coming.set()
                released.wait(0.05)
            super().start()

    side = Side(tmp_path)
    monkeypatch.setattr(threading, "Thread", Late)
    with side.channel():
        assert coming.wait(10)
        side.receiver.close()
    side.holds_nothing()


class BareListener:
    """A listener that finds no descriptor for its first peer."""

    def __init__(self, inner: socket.socket) -> None:
        self._inner = inner
        self._problems = [OSError("too many open files")]

    def accept(self) -> tuple[socket.socket, object]:
        if self._problems:
            raise self._problems.pop()
        return self._inner.accept()

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        self._inner.close()

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)


def test_a_host_that_lacked_a_descriptor_takes_handovers_again(
    side: Side, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.handover.receiver._ACCEPT_AGAIN_S", 0.01)
    address = f"unix:{tmp_path / 'bare.sock'}"
    bare: Any = BareListener(listen(address))
    receiver = HandoverReceiver(bare, side.area, FORMAT)
    with MessageChannel(dial(address), 30.0) as channel:
        channel.send(HandoverOffer(HANDOVER_VERSION, bytes(16), "other", "m", "r", "kv", BLOCK_BYTES, 1, False))
        assert isinstance(channel.receive(HandoverGrant, HandoverRefusal), HandoverRefusal)
    receiver.close()
