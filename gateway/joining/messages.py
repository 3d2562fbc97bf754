"""What a host and a gateway say to each other about joining, over TLS: each question a 4-byte length and one msgpack
struct, and one answer. It knows no connection."""

import struct
from collections.abc import Iterator
from typing import Final

import msgspec

from tenants.records.catalogue import HostCatalogue

MESSAGE_BYTES_MAX: Final = 1 << 20  # of a question
ANSWER_BYTES_MAX: Final = 8 << 20  # with a catalogue in it
_LENGTH: Final = struct.Struct(">I")


class AuthorityQuestion(msgspec.Struct, frozen=True, array_like=True, tag="authority"):
    """stranger → gateway: the authority's certificate, which the stranger knows by the digest in its token."""


class JoinRequest(msgspec.Struct, frozen=True, array_like=True, tag="join"):
    """stranger → gateway. `signing_request` shows the key; `address` is HOST:PORT, its host empty where it is the one
    that the gateway sees; `role` is what the host is to be, which the token must be for."""

    token: str
    name: str
    signing_request: bytes
    address: str
    role: str


class RenewRequest(msgspec.Struct, frozen=True, array_like=True, tag="renew"):
    """member → gateway: the same certificate for another while, for the same key. `address` as in JoinRequest."""

    signing_request: bytes
    address: str


class NewsQuestion(msgspec.Struct, frozen=True, array_like=True, tag="news"):
    """member → gateway: whose keys were removed, where gateways are, and the catalogue where it is another than the
    `known` one. `address` as in JoinRequest; `has` is what the member has of the catalogue."""

    address: str
    known: str = ""
    has: HostCatalogue | None = None


JoinMessage = AuthorityQuestion | JoinRequest | RenewRequest | NewsQuestion


class JoinAnswer(msgspec.Struct, frozen=True, array_like=True):
    """gateway → host. Where `problem` says why not, in words, there is nothing else.

    sealed_secret  the server's secret, sealed to a gateway's key.
    removed        keys of removed members whose certificates still hold.
    gateways       HOST:PORT of all gateways where hosts join and renew.
    mirror         the CatalogueMirror as JSON; empty where the member has it already.
    """

    problem: str = ""
    authority: bytes = b""
    certificate: bytes = b""
    sealed_secret: bytes = b""
    removed: list[str] = []
    gateways: list[str] = []
    mirror: bytes = b""


class MessageError(ValueError):
    """The peer sent bytes that are no message."""


_encode = msgspec.msgpack.Encoder().encode
_decode_question = msgspec.msgpack.Decoder(JoinMessage).decode
_decode_answer = msgspec.msgpack.Decoder(JoinAnswer).decode


def encode_message(message: JoinMessage | JoinAnswer) -> bytes:
    """The message's bytes, its length included."""
    body = _encode(message)
    return _LENGTH.pack(len(body)) + body


def message_length(head: bytes, most: int = MESSAGE_BYTES_MAX) -> int:
    """How long the body behind these four bytes is. Raises MessageError where that is over `most`."""
    (length,) = _LENGTH.unpack(head)
    if length > most:
        raise MessageError(f"a message of {length} bytes is over the limit of {most}")
    return int(length)


def decode_answer(body: bytes) -> JoinAnswer:
    """Raises MessageError."""
    try:
        return _decode_answer(body)
    except msgspec.MsgspecError as error:
        raise MessageError(f"an answer that cannot be read: {error}") from None


def take_questions(pending: bytearray) -> Iterator[JoinMessage]:
    """The whole questions at the beginning of `pending`, which are taken from it. Raises MessageError."""
    while len(pending) >= _LENGTH.size:
        length = message_length(bytes(pending[: _LENGTH.size]))
        if len(pending) < _LENGTH.size + length:
            return
        body = bytes(pending[_LENGTH.size : _LENGTH.size + length])
        del pending[: _LENGTH.size + length]
        try:
            yield _decode_question(body)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise MessageError(f"a question that cannot be read: {error}") from None
