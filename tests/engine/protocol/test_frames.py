"""engine/protocol/frames.py: bytes become frames whole, bounded, or not at all; addresses are sockets that may be
used."""

import random

import msgspec
import pytest

from engine.protocol.address import AddressError, parse_address
from engine.protocol.frames import (
    FRAME_BYTES_MAX,
    PROTOCOL_VERSION,
    Cancel,
    Frame,
    FrameError,
    FrameReader,
    Hello,
    PollLoad,
    Reject,
    ReplicaLoad,
    Submit,
    encode_frame,
)
from engine.protocol.specs import ModelSpec
from engine.protocol.types import RejectReason, SamplingParams, Scope, ScopeKind

FRAMES: list[Frame] = [
    Cancel([1, 2, 3]),
    Reject(7, RejectReason.BUSY, "später", 250),
    Submit(
        1, b"\1\0\0\0", Scope(ScopeKind.TENANT, b"a" * 16, 3), SamplingParams(seed=2**63 - 1, logit_bias={4: -1.5}), 9
    ),
    ReplicaLoad(1, 2, 3, 4, 5, 6, draining=True, counters={"steps": 2**40}),
    PollLoad(),
]


def framed(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


@pytest.mark.parametrize("seed", range(20))
def test_frames_come_back_equal_however_the_bytes_are_cut(seed: int) -> None:
    print("seed", seed)
    pick = random.Random(seed)
    sent = pick.choices(FRAMES, k=30)
    stream, reader, received = b"".join(map(encode_frame, sent)), FrameReader(), []
    while stream:
        size = pick.choice([1, 2, 5, 50, 500])
        received += reader.feed(stream[:size])
        stream = stream[size:]
    assert received == sent


def test_a_report_said_again_is_the_same_one_and_nothing_else_is_kept() -> None:
    reader = FrameReader()
    load = encode_frame(FRAMES[3])
    (first,) = reader.feed(load)
    assert [frame is first for frame in (*reader.feed(load), *reader.feed(load))] == [True, True]
    assert list(reader.feed(load[:5])) == []
    assert list(reader.feed(load[5:])) == [first], "in pieces it is read anew"
    submit = encode_frame(FRAMES[2])
    assert list(reader.feed(submit)) == list(reader.feed(submit)) == [FRAMES[2]]
    assert reader._report_bytes == load
    (other,) = reader.feed(encode_frame(ReplicaLoad(2, 2, 3, 4, 5, 6)))
    assert other == ReplicaLoad(2, 2, 3, 4, 5, 6)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"abc",
        b"\x92\xa6cancel",  # cut short
        b"\x92\xa6\xff\xff\xff\xff\xff\xff\x90",  # a tag that is no text
        encode_frame(FRAMES[1])[4:].replace("ä".encode(), b"\xff\xfe"),  # a message that is no text
        b"\x93\xa6cancel\x90" + b"\x91" * 1_000_000 + b"\xc0",  # an extra field without a bottom
        b"\x92\xa6cancel\xdd\x7f\xff\xff\xff",  # a list of two thousand million
        msgspec.msgpack.encode(["cancel", ["one"]]),
        msgspec.msgpack.encode(["reject", 1, "whatever", ""]),
        msgspec.msgpack.encode(["no such frame"]),
    ],
    ids=["empty", "text", "short", "tag", "message", "deep", "long", "type", "enum", "kind"],
)
def test_a_body_that_is_no_frame_is_a_frame_error(body: bytes) -> None:
    with pytest.raises(FrameError):
        list(FrameReader().feed(framed(body)))


def hello(protocol: int = PROTOCOL_VERSION) -> list[object]:
    return ["hello", protocol, "m", "", "1", 1, 1, 1, 1, 1]


@pytest.mark.parametrize(
    "fields",
    [
        hello(9),
        [*hello(9), {"tomorrow": [1, 2]}, "more"],
        hello(9)[:4],
        ["hello", 9, {"of": "another shape"}],
        ["hello", 9],
    ],
    ids=["alike", "more fields", "fewer fields", "other types", "version alone"],
)
def test_a_hello_of_another_version_is_refused_by_its_number(fields: list[object]) -> None:
    with pytest.raises(
        FrameError, match="protocol 9, and this process speaks protocol 2 to 3: install the same hearth"
    ):
        list(FrameReader().feed(framed(msgspec.msgpack.encode(fields))))


def test_a_peer_one_version_on_is_read_and_one_two_versions_on_is_refused_by_its_number() -> None:
    next_one = Hello(PROTOCOL_VERSION, "m", "r", "1", 0, 64, 64, 16, 8, newest_protocol=PROTOCOL_VERSION + 1)
    assert list(FrameReader().feed(encode_frame(next_one))) == [next_one]
    oldest = PROTOCOL_VERSION + 1
    after_it = msgspec.structs.replace(next_one, protocol=oldest, newest_protocol=PROTOCOL_VERSION + 2)
    with pytest.raises(FrameError, match=f"protocol {oldest}, and this process speaks protocol 2 to 3: install"):
        list(FrameReader().feed(encode_frame(after_it)))


def test_a_hello_of_this_version_with_fields_of_a_later_one_is_read() -> None:
    (frame,) = FrameReader().feed(framed(msgspec.msgpack.encode([*hello(), PROTOCOL_VERSION + 1, "later"])))
    assert isinstance(frame, Hello)


@pytest.mark.parametrize("rest", [[], [1], [{"any": "thing"}, [[]]]])
def test_a_frame_of_an_unknown_kind_is_refused_by_its_name(rest: list[object]) -> None:
    with pytest.raises(FrameError, match="'transfer' frame, which protocol 3 does not have: install the same hearth"):
        list(FrameReader().feed(framed(msgspec.msgpack.encode(["transfer", *rest]))))


@pytest.mark.parametrize(
    "first", [b"\xc0", b"\xa1x", b"\xdd\x7f\xff\xff\xff", b"\xcb\0", b"\x91" * 1_000_000 + b"\xc0"]
)
def test_a_hello_without_a_version_is_no_frame(first: bytes) -> None:
    with pytest.raises(FrameError, match="no frame"):
        list(FrameReader().feed(framed(b"\x92\xa5hello" + first)))


def test_a_length_over_the_limit_is_refused_before_its_body_comes() -> None:
    with pytest.raises(FrameError, match="over the limit"):
        list(FrameReader().feed((FRAME_BYTES_MAX + 1).to_bytes(4, "big")))


def test_frames_before_a_broken_one_are_still_given() -> None:
    reader = FrameReader().feed(encode_frame(FRAMES[0]) + framed(b"abc"))
    assert next(reader) == FRAMES[0]
    with pytest.raises(FrameError):
        next(reader)


@pytest.mark.parametrize("seed", range(20))
def test_any_change_of_a_frames_bytes_is_a_frame_or_a_frame_error(seed: int) -> None:
    print("seed", seed)
    pick = random.Random(seed)
    for _ in range(500):
        body = bytearray(encode_frame(pick.choice(FRAMES))[4:])
        for _ in range(pick.randint(1, 4)):
            body[pick.randrange(len(body))] = pick.randrange(256)
        try:
            list(FrameReader().feed(framed(bytes(body))))
        except FrameError:
            continue


@pytest.mark.parametrize(
    ("address", "target"),
    [
        ("unix:/run/a.sock", "/run/a.sock"),
        ("tcp:127.0.0.1:80", ("127.0.0.1", 80)),
        ("tcp:localhost:80", ("localhost", 80)),
        ("tcp:[::1]:80", ("::1", 80)),
    ],
)
def test_addresses_name_sockets(address: str, target: object) -> None:
    assert parse_address(address) == target


@pytest.mark.parametrize("address", ["", "unix:", "tcp:", "tcp:127.0.0.1", "tcp::80", "http://x", "tcp:localhost:-1"])
def test_what_names_no_socket_is_refused(address: str) -> None:
    with pytest.raises(AddressError):
        parse_address(address)


@pytest.mark.parametrize("host", ["10.0.0.1", "0.0.0.0", "example.com", "127.0.0.1.example.com", "[::]"])
def test_plain_tcp_is_refused_outside_loopback(host: str) -> None:
    with pytest.raises(AddressError, match="outside loopback"):
        parse_address(f"tcp:{host}:80")


def test_specs_refuse_what_they_do_not_know() -> None:
    with pytest.raises(msgspec.ValidationError, match="colour"):
        msgspec.json.decode('{"name": "@cf/a/b", "folder": "f", "colour": 1}', type=ModelSpec)
