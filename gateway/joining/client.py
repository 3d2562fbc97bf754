"""A host's side of joining: it meets a gateway whose authority its token names, gets its certificate, renews it, and
hears whose keys were removed. It knows no store."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Final

from cryptography.hazmat.primitives.asymmetric import ec

from gateway.identity.authority import authority_digest, open_sealed, signing_request
from gateway.identity.files import HostCredentials
from gateway.identity.host_identity import HostRole, IdentityError, peer_identity
from gateway.joining.messages import (
    ANSWER_BYTES_MAX,
    AuthorityQuestion,
    JoinAnswer,
    JoinMessage,
    JoinRequest,
    MessageError,
    decode_answer,
    encode_message,
    message_length,
)
from gateway.joining.token_text import TokenText

ANSWER_S: Final = 10.0
JOIN_PORT: Final = 8790  # where a URL says none


class NoGatewayAnswers(Exception):
    """No gateway answers now; the message says which was asked, and what came of it."""


class JoinRefused(Exception):
    """A gateway said no, in these words; to ask again would not help."""


@dataclass(frozen=True, slots=True)
class Joined:
    """What a host has once it is a member. `secret` is the server's, for gateways alone."""

    certificate: bytes
    authority: bytes
    secret: bytes | None


class GatewayLine:
    """An open connection to a gateway where hosts join."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def ask(self, question: JoinMessage) -> JoinAnswer:
        """Raises JoinRefused, NoGatewayAnswers."""
        try:
            async with asyncio.timeout(ANSWER_S):
                self._writer.write(encode_message(question))
                head = await self._reader.readexactly(4)
                body = await self._reader.readexactly(message_length(head, ANSWER_BYTES_MAX))
            answer = decode_answer(body)
        except (OSError, EOFError, TimeoutError, MessageError) as error:
            raise NoGatewayAnswers(_text(error)) from None
        if answer.problem:
            raise JoinRefused(answer.problem)
        return answer


@contextlib.asynccontextmanager
async def gateway_line(address: str, context: ssl.SSLContext, *, verified: bool = True) -> AsyncIterator[GatewayLine]:
    """A connection to the gateway at HOST:PORT. Raises NoGatewayAnswers, also where what answers there is no gateway
    of this cluster."""
    host, port = split_address(address)
    try:
        async with asyncio.timeout(ANSWER_S):
            reader, writer = await asyncio.open_connection(host, port, ssl=context, server_hostname="gateway")
    except (OSError, ValueError, OverflowError) as error:  # the last ones of a name or a port that cannot be
        raise NoGatewayAnswers(f"{address}: {_text(error)}") from None
    try:
        if verified:
            _require_gateway(writer)
        yield GatewayLine(reader, writer)
    except NoGatewayAnswers as error:
        raise NoGatewayAnswers(f"{address}: {error}") from None
    finally:
        writer.transport.abort()


async def join_cluster(
    gateway: str, token: TokenText, role: HostRole, name: str, address: str, key: ec.EllipticCurvePrivateKey
) -> Joined:
    """Becomes a member of this role, reached at `address`, for what the token says. The secret part of the token is
    said only once the gateway has shown that it is of the token's cluster. Raises JoinRefused, NoGatewayAnswers,
    IdentityError."""
    stranger = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    stranger.minimum_version = ssl.TLSVersion.TLSv1_3
    stranger.check_hostname = False
    stranger.verify_mode = ssl.CERT_NONE
    async with gateway_line(gateway, stranger, verified=False) as line:
        authority = (await line.ask(AuthorityQuestion())).authority
    try:
        known = authority_digest(authority) == token.authority
    except ValueError:
        known = False
    if not known:
        raise IdentityError(
            f"{gateway} is no gateway of the token's cluster: check the address, or ask for a token of that cluster"
        )
    stranger.verify_mode = ssl.CERT_REQUIRED
    stranger.load_verify_locations(cadata=authority.decode())
    async with gateway_line(gateway, stranger) as line:
        answer = await line.ask(JoinRequest(str(token), name, signing_request(key), address, role))
    secret = open_sealed(key, answer.sealed_secret) if answer.sealed_secret else None
    return Joined(answer.certificate, answer.authority, secret)


async def ask_gateways(
    gateways: Sequence[str], credentials: HostCredentials, question: JoinMessage
) -> tuple[JoinAnswer, str]:
    """The answer of the first gateway that gives one, and which that was. Raises NoGatewayAnswers with what came of
    each, JoinRefused."""
    problems = []
    for address in gateways:
        try:
            async with gateway_line(address, credentials.client) as line:
                return await line.ask(question), address
        except NoGatewayAnswers as error:
            problems.append(str(error))
    raise NoGatewayAnswers("; ".join(problems) or "no gateway is known")


def split_address(address: str) -> tuple[str, int]:
    """`HOST:PORT`, or `https://HOST` with a port or at JOIN_PORT → its parts. Raises NoGatewayAnswers."""
    place = address.removeprefix("https://").removesuffix("/")
    if place != address and ":" not in place.rpartition("]")[2]:
        place += f":{JOIN_PORT}"
    host, _, port = place.rpartition(":")
    if not host or "/" in host or not port.isdigit():
        raise NoGatewayAnswers(f"{address!r} is no HOST:PORT or https://HOST where hosts join at a gateway")
    return host.strip("[]"), int(port)


def _require_gateway(writer: asyncio.StreamWriter) -> None:
    """Raises NoGatewayAnswers."""
    try:
        peer = peer_identity(writer.get_extra_info("peercert"))
    except IdentityError as error:
        raise NoGatewayAnswers(str(error)) from None
    if peer.role is not HostRole.GATEWAY:
        raise NoGatewayAnswers(f"it is a {peer.role}, and no gateway")


def _text(error: Exception) -> str:
    return str(error) or f"no answer within {ANSWER_S:g} s"
