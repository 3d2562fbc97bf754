"""What gateways of two cells say to each other: each question a 4-byte length and one msgpack struct, and one answer to
each in their order. It knows no connection."""

import struct
from collections.abc import Callable
from typing import Final

import msgspec

from tenants.auth.copies import AccountCopy, KnownCopy
from tenants.limits.lending import LeaseRequest, LeaseReturn
from tenants.records.holds import Denied, Granted

MESSAGE_BYTES_MAX: Final = 4 << 20
_LENGTH: Final = struct.Struct(">I")


class LookUp(msgspec.Struct, frozen=True, array_like=True, tag="look_up"):
    """A credential of an account whose home is asked."""

    credential: str


class Refresh(msgspec.Struct, frozen=True, array_like=True, tag="refresh"):
    """Copies that are in use: what of them has changed?"""

    known: list[KnownCopy]


class Lend(msgspec.Struct, frozen=True, array_like=True, tag="lend"):
    """A slice of a budget is wanted."""

    request: LeaseRequest


class Settle(msgspec.Struct, frozen=True, array_like=True, tag="settle"):
    """The use of a lease."""

    returned: LeaseReturn


CellQuestion = LookUp | Refresh | Lend | Settle


class CellAnswer(msgspec.Struct, frozen=True):
    """One of these; `refused` and `away` are words for people, and `away` asks for another try.

    copies      answers to Refresh, in its order: None is unchanged.
    gone        those of them, by their places, that open nothing any more.
    suspended   the account of a credential that is good.
    regions     where alone the account of a good credential may be served; the asker's, `region`, is none of them.
    """

    refused: str = ""
    away: str = ""
    unknown: str = ""
    suspended: bool = False
    granted: Granted | None = None
    denied: Denied | None = None
    copies: list[AccountCopy | None] = []
    gone: list[int] = []
    region: str = ""
    regions: list[str] = []


class CellMessageError(ValueError):
    """The peer sent bytes that are no message."""


_encode = msgspec.msgpack.Encoder().encode
_decode_question: Callable[[bytes], CellQuestion] = msgspec.msgpack.Decoder(CellQuestion).decode
_decode_answer = msgspec.msgpack.Decoder(CellAnswer).decode


def encode(message: CellQuestion | CellAnswer) -> bytes:
    """The message's bytes, its length included."""
    body = _encode(message)
    return _LENGTH.pack(len(body)) + body


def body_length(head: bytes) -> int:
    """How long the body behind these four bytes is. Raises CellMessageError."""
    (length,) = _LENGTH.unpack(head)
    if length > MESSAGE_BYTES_MAX:
        raise CellMessageError(f"a message of {length} bytes is over the limit of {MESSAGE_BYTES_MAX}")
    return int(length)


def decode_question(body: bytes) -> CellQuestion:
    """Raises CellMessageError."""
    try:
        return _decode_question(body)
    except (msgspec.MsgspecError, ValueError) as error:
        raise CellMessageError(f"a question that cannot be read: {error}") from None


def decode_answer(body: bytes) -> CellAnswer:
    """Raises CellMessageError."""
    try:
        return _decode_answer(body)
    except (msgspec.MsgspecError, ValueError) as error:
        raise CellMessageError(f"an answer that cannot be read: {error}") from None
