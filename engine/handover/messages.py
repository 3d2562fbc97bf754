"""What two replicas say to each other while KV blocks move, and how bytes become that: a 4-byte big-endian length and
one msgpack-encoded tagged struct. Bytes of blocks follow the BlockRun that names them, unless the memory is shared or
the sender writes to it by itself.

    sender → receiver  HandoverOffer │ [WindowAnswer] BlockRun… HandoverBeat… [FabricLeft] │ HandoverSeal │
    receiver → sender                │ HandoverGrant  BlocksTaken…                         │       HandoverSealed

A grant of the device's memory is answered; where the sender does not reach it, another one follows, of the host's. One
over a fabric holds until the sender says that it left it, at once or in the midst.

It knows no sockets, no sequences and no tensors.
"""

import enum
import hashlib
import struct
from typing import Final

import msgspec

HANDOVER_VERSION: Final = 1
ID_BYTES: Final = 16
MESSAGE_BYTES_MAX: Final = 64 << 10
RUN_BLOCKS_MAX: Final = 512  # in one message
RUN_BYTES_MAX: Final = 1 << 20  # of blocks that travel behind one message, but for a block that alone is larger
WINDOW_RUN_BYTES_MAX: Final = 256 << 20  # of blocks that a device copies by itself: 0.7 ms of NVLink
LENGTH: Final = struct.Struct(">I")


class HandoverFault(enum.StrEnum):
    """Why a receiver takes nothing."""

    VERSION = "version"  # the sender speaks another version of this protocol
    BOOT = "boot"  # the receiver was started again since it was chosen
    MODEL = "model"  # another model,
    REVISION = "revision"  # other weights,
    LAYOUT = "layout"  # or blocks whose bytes mean something else
    REGION = "region"  # it is in no region that the sequence may go to
    FULL = "full"  # it holds as much for others as it may
    INVALID = "invalid"  # what a correct sender does not send


class HandoverOffer(msgspec.Struct, frozen=True, array_like=True, tag="offer"):
    """The first message: at most `blocks` blocks of block_bytes each are to be held under `id`, which does not tell the
    key. `boot` is the start of the receiver that is meant. `shares_memory`: the sender can take a descriptor, and one
    of a device's memory where that is of its kind of `windows`. Where there are `regions`, a receiver in none of them
    refuses. `fabric`: the sender writes to memory of hosts that declare the same one."""

    version: int
    id: bytes
    boot: str
    model: str
    revision: str
    layout: str
    block_bytes: int
    blocks: int
    shares_memory: bool = False
    regions: list[str] = []
    windows: str = ""
    fabric: str = ""


class HandoverGrant(msgspec.Struct, frozen=True, array_like=True, tag="grant"):
    """There is room. Whoever hears nothing of the other for lease_ms lets go. `shared`: a byte follows with the
    descriptor of the memory that the blocks are to be written to. `window`: it is the device's, and checksums are those
    of devices (kernels/ranks/block_copies.py). `endpoint`: metadata of the one whose memory, from `address` on, the
    blocks are to be written to before their run is sent; empty: not over a fabric."""

    lease_ms: int
    shared: bool = False
    window: bool = False
    endpoint: bytes = b""
    address: int = 0


class WindowAnswer(msgspec.Struct, frozen=True, array_like=True, tag="window"):
    """Whether the sender reaches the memory that it was granted."""

    mapped: bool


class FabricLeft(msgspec.Struct, frozen=True, array_like=True, tag="left"):
    """The sender does not reach the endpoint that it was granted, or no longer: blocks follow their runs from here."""


class HandoverRefusal(msgspec.Struct, frozen=True, array_like=True, tag="refusal"):
    """There is none, for this reason: the last message."""

    fault: HandoverFault
    message: str


class BlockRun(msgspec.Struct, frozen=True, array_like=True, tag="run"):
    """Blocks first, first + 1, …: their names, one behind the other, and a checksum of each, of 64 bits: XXH3, or in
    a window that of devices."""

    first: int
    names: bytes
    checksums: list[int]


class HandoverBeat(msgspec.Struct, frozen=True, array_like=True, tag="beat"):
    """Nothing new: the sender still computes."""


class BlocksTaken(msgspec.Struct, frozen=True, array_like=True, tag="taken"):
    """The blocks below `blocks` are there, of which those below `whole` have their checksums. This run took took_us to
    come and to be compared."""

    blocks: int
    whole: int
    took_us: int = 0


class HandoverSeal(msgspec.Struct, frozen=True, array_like=True, tag="seal"):
    """These were all."""

    blocks: int


class HandoverSealed(msgspec.Struct, frozen=True, array_like=True, tag="sealed"):
    """`whole` blocks are held for whoever has the key, until the lease is over: the last message."""

    whole: int


Message = (
    HandoverOffer
    | HandoverGrant
    | WindowAnswer
    | FabricLeft
    | HandoverRefusal
    | BlockRun
    | HandoverBeat
    | BlocksTaken
    | HandoverSeal
    | HandoverSealed
)


class HandoverError(ValueError):
    """The peer sent what is no message of this protocol, or not here."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


def encode_message(message: Message) -> bytes:
    body = _encoder.encode(message)
    assert len(body) <= MESSAGE_BYTES_MAX, f"a message of {len(body)} bytes"
    return LENGTH.pack(len(body)) + body


def body_bytes(length: bytes) -> int:
    """How many bytes the body behind these four has. Raises HandoverError."""
    (count,) = LENGTH.unpack(length)
    if count > MESSAGE_BYTES_MAX:
        raise HandoverError(f"a message of {count} bytes is over the limit of {MESSAGE_BYTES_MAX}")
    return int(count)


def decode_message(body: bytes) -> Message:
    """Raises HandoverError."""
    try:
        message: Message = _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise HandoverError(f"a body that is no message: {error}") from error
    return message


def handover_id(key: bytes) -> bytes:
    """What both sides call the handover of a key: whoever knows it can neither name its blocks nor ask for them."""
    return hashlib.sha256(b"handover" + key).digest()[:ID_BYTES]


def run_blocks(block_bytes: int) -> int:
    """How many blocks of this size one message announces at most."""
    return max(1, min(RUN_BLOCKS_MAX, RUN_BYTES_MAX // block_bytes))


def window_run_blocks(block_bytes: int) -> int:
    """How many blocks one message announces at most that a device copied by itself."""
    return max(1, min(RUN_BLOCKS_MAX, WINDOW_RUN_BYTES_MAX // block_bytes))
