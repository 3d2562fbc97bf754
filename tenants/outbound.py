"""HTTP requests to servers of others: each goes to the very address that was checked, and no more is read than asked.

It follows no redirect, uses no proxy, and keeps neither cookies nor connections. The caller limits the time.
"""

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Final

import httpx

_TRANSLATED: Final = ipaddress.IPv6Network("64:ff9b::/96")  # IPv4 addresses behind a NAT64, RFC 6052
_UNICAST: Final = ipaddress.IPv6Network("2000::/3")  # all public ones of IPv6


class PrivateAddress(OSError):
    """The host has an address that is not public."""


@asynccontextmanager
async def send(
    method: str,
    url: str,
    tls: ssl.SSLContext | None,
    *,
    headers: Mapping[str, str],
    content: bytes | None = None,
    public_only: bool = False,
) -> AsyncIterator[httpx.Response]:
    """Yields the answer's head; `read_body` reads its body.

    `public_only`: a host with an address that is not public gets no connection. Raises PrivateAddress then, OSError,
    and ValueError for a URL that cannot be called and for what is no HTTP.
    """
    try:
        request = httpx.Request(method, url, headers={**headers, "connection": "close"}, content=content)
        if request.url.scheme == "https" and tls is None:
            raise ValueError("https needs certificates to trust")
        async with httpx.AsyncHTTPTransport(verify=tls or False, trust_env=False) as transport:
            response = await _send_pinned(transport, request, public_only)
            try:
                yield response
            finally:
                await response.aclose()
    except httpx.RemoteProtocolError as error:
        raise ValueError(f"it sends no HTTP that can be read to its end: {error}") from None
    except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        raise ValueError(str(error)) from None
    except httpx.HTTPError as error:
        raise OSError(_reason(error)) from None


async def _send_pinned(
    transport: httpx.AsyncHTTPTransport, request: httpx.Request, public_only: bool
) -> httpx.Response:
    """Resolves the host once, and tries its addresses in turn until one takes the connection, with the host's own name
    in TLS and in Host."""
    url, host = request.url, request.url.raw_host.decode("ascii")
    addresses = await resolve(host, url.port or (443 if url.scheme == "https" else 80))
    private = [address for address in addresses if public_only and not is_public(address)]
    if private:
        raise PrivateAddress(f"{host} is {private[0]}, which is no public address")
    request.extensions["sni_hostname"] = host
    for address in addresses:
        request.url = url.copy_with(host=address)  # the header Host stays
        try:
            return await transport.handle_async_request(request)
        except httpx.ConnectError:
            if address == addresses[-1]:
                raise
    raise OSError(f"{host} has no address")


async def read_body(response: httpx.Response, limit_bytes: int) -> bytes:
    """Returns the body as it is sent, whatever its encoding. Raises ValueError if it is larger than the limit."""
    body = bytearray()
    async for piece in response.aiter_raw():
        body += piece
        if len(body) > limit_bytes:
            raise ValueError(f"it answers with more than {limit_bytes} bytes")
    return bytes(body)


async def resolve(host: str, port: int) -> list[str]:
    """Returns the host's addresses, in the order in which to try them. Raises OSError if there are none."""
    entries = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in entries))


def is_public(text: str) -> bool:
    """Whether an address is public; an IPv4 address within IPv6 counts as itself."""
    address = ipaddress.ip_address(text.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        translated = ipaddress.IPv4Address(address.packed[-4:]) if address in _TRANSLATED else None
        address = address.ipv4_mapped or address.sixtofour or translated or address
    return address.is_global and not address.is_multicast and (address.version == 4 or address in _UNICAST)


def _reason(error: BaseException) -> str:
    """What the system said; the library's own words if it said nothing."""
    reason = str(error)
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
        reason = str(error) if isinstance(error, OSError) else reason
    return reason or type(error).__name__
