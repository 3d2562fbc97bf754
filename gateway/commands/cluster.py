"""`hearth cluster`: which hosts serve together. It works on the store that a gateway's host names."""

import socket
import time
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Final

import msgspec
import psutil
from cryptography.hazmat.primitives.asymmetric import ec
from cyclopts import Parameter

from gateway.commands.access.joining import host_name
from gateway.commands.access.store_access import StoreAccess, with_store_access
from gateway.commands.terminal.options import Duration, Json, Source, command_app
from gateway.commands.terminal.output import fail, print_either, print_table, time_text
from gateway.identity.authority import authority_digest, found_authority, open_authority, signing_request
from gateway.identity.files import read_credentials, write_identity
from gateway.identity.host_identity import HostIdentity, HostRole, IdentityError
from gateway.joining.messages import JoinRequest
from gateway.joining.service import JoinService, gateway_addresses
from gateway.joining.token_text import TokenText, new_token_text
from gateway.settings.config import Config
from tenants.audit import SYSTEM
from tenants.records.cluster import ClusterMember, JoinToken
from tenants.store.protocol import ClusterStore

_TEACHING: Final = """\
examples:
  hearth cluster init --region eu-west --site fra1     on the first gateway's host, once
  hearth gateway                                       serves, and lets hosts join on port 8790
  hearth cluster token                                 prints what to run on a machine's host
  hearth cluster token --role gateway --uses 2 --ttl 1d --region eu-west
  hearth cluster members
  hearth cluster remove m7                             cut off within 5 s; its key never comes back

On a machine's host: hearth machine --join GATEWAY:8790 --token …

Hosts speak TLS 1.3 to each other and show certificates that name their role, region and site as the token said them.
A certificate lasts 24 hours and is renewed after two thirds of them. Files of your own PKI take their place: [cluster]
certificate, key and authority in hearth.toml.
"""
_HOUR_S: Final = 3600.0
_USES_MAX: Final = 10_000
_GONE_S: Final = 7 * 86_400  # a gateway whose certificate has been old for so long is gone for good, as pods go
app = command_app("cluster", "hosts that serve together: found, join, list, remove", _TEACHING)
Region = Annotated[str, Parameter(help="where, as accounts may allow it: a-z, 0-9, -")]
Site = Annotated[str, Parameter(help="where within the region: a-z, 0-9, -")]


@app.command
def init(
    *,
    cluster: Annotated[str, Parameter(help="the cluster's name (default: hearth)")] = "hearth",
    name: Annotated[str | None, Parameter(help="this host's name in it (default: its host name)")] = None,
    region: Region = "",
    site: Site = "",
    source: Source,
) -> int:
    """Found a cluster, or enter it: a host with the store and the server's secret is a gateway of it."""
    config = source.load()
    return _with_store(config, lambda access: _init(access, config, cluster, name or host_name(), region, site), True)


async def _init(access: StoreAccess, config: Config, cluster: str, name: str, region: str, site: str) -> int:
    if config.cluster.own_pki:
        return fail("[cluster] certificate is set: the hosts of your own PKI are no members of a cluster of the store")
    now, identity = time.time(), HostIdentity(cluster, HostRole.GATEWAY, name, region, site)
    store, paths = access.store.cluster, config.cluster.paths(config.state)
    founded = await store.found(found_authority(cluster, access.secret, now))
    if paths.exist:
        print(f"this host is the {read_credentials(paths).identity} already: {paths.certificate}")
        return 0
    for member in await store.members():
        if member.role == HostRole.GATEWAY and member.expires_at < now - _GONE_S:
            await store.remove(member.id)
    record = await store.authority()
    assert record is not None
    authority = open_authority(record, access.secret)
    text = await _add_token(store, authority.pem, HostRole.GATEWAY, identity, 1, _HOUR_S)
    key = ec.generate_private_key(ec.SECP256R1())
    service = JoinService(store, authority, access.secret, list, list)
    told = config.cluster.told_address(config.cluster.join_listen)
    request = JoinRequest(str(text), name, signing_request(key), told, HostRole.GATEWAY)
    answer = await service.answer(request, None, "", _own_address())
    if answer.problem:
        return fail(answer.problem)
    write_identity(paths, key, answer.certificate, authority.pem)
    await access.note(SYSTEM, "cluster.init", identity.member_id, cluster=record.cluster, founded=founded)
    print(f"{'founded' if founded else 'entered'} the cluster {record.cluster}; this host is the {identity}")
    if founded:
        print("next: `hearth gateway` here, then `hearth cluster token` for each host that is to join")
    return 0


@app.command
def token(
    *,
    role: Annotated[HostRole, Parameter(help="machine or gateway (default: machine)")] = HostRole.MACHINE,
    region: Annotated[str | None, Parameter(help="where (default: this host's region)")] = None,
    site: Annotated[str | None, Parameter(help="where within the region (default: this host's site)")] = None,
    name: Annotated[str, Parameter(help="the only host that it is for (default: any)")] = "",
    uses: Annotated[int, Parameter(help="for how many hosts (default: 1)")] = 1,
    ttl: Annotated[Duration, Parameter(help="for how long, like 1h or 7d (default: 1h)")] = _HOUR_S,
    bare: Annotated[bool, Parameter(help="print the token alone, for a file")] = False,
    json: Json = False,
    source: Source,
) -> int:
    """A token that lets hosts join, shown this once."""
    config = source.load()

    async def make(access: StoreAccess) -> int:
        if not 1 <= uses <= _USES_MAX:
            return fail(f"--uses is to be 1 to {_USES_MAX}")
        if role is HostRole.GATEWAY and config.store_url.startswith("sqlite:"):
            return fail("gateways share a store, and SQLite serves one: set [store] url to a Redis on all of them")
        store = access.store.cluster
        record = await store.authority()
        if record is None:
            return fail("there is no cluster yet: `hearth cluster init`")
        paths = config.cluster.paths(config.state)
        here = read_credentials(paths).identity if paths.exist else HostIdentity(record.cluster, role, "here")
        place = HostIdentity(
            record.cluster,
            role,
            name or "any",
            here.region if region is None else region,
            here.site if site is None else site,
        )
        text = await _add_token(store, record.certificate, role, place, uses, ttl, name)
        detail = {"role": role, "region": place.region, "site": place.site, "name": name, "uses": uses, "ttl_s": ttl}
        await access.note(SYSTEM, "cluster.token", text.id, **detail)
        gateways = gateway_addresses(await store.members(), time.time())
        document = {"token": str(text), "join": gateways, "role": role, "region": place.region, "site": place.site}
        line = f"hearth {role} --join {(gateways or ['GATEWAY:8790'])[0]} --token {text}"
        print_either(json, document, lambda: print(text if bare else line))
        return 0

    return _with_store(config, make)


@app.command
def members(*, json: Json = False, source: Source) -> int:
    """All hosts that joined."""

    async def show(access: StoreAccess) -> int:
        found = await access.store.cluster.members()
        print_either(json, [_member_json(member) for member in found], lambda: _print_members(list(found)))
        return 0

    return _with_store(source.load(), show)


@app.command
def remove(member: Annotated[str, Parameter(help="its name, or ROLE/NAME")], /, *, source: Source) -> int:
    """Cut a host off, within 5 s and for good."""

    async def cut(access: StoreAccess) -> int:
        found = [each for each in await access.store.cluster.members() if member in (each.id, each.name)]
        if not found:
            return fail(f"there is no member {member}: `hearth cluster members` lists them")
        if len(found) > 1:
            return fail(f"there are {' and '.join(each.id for each in found)}: say which")
        await access.store.cluster.remove(found[0].id)
        await access.note(SYSTEM, "cluster.remove", found[0].id, key=found[0].key)
        print(f"removed the {found[0].role} {found[0].name}")
        if found[0].role == HostRole.GATEWAY:
            print("it has had the server's secret and the store: change the store's password where it is not trusted")
        return 0

    return _with_store(source.load(), cut)


async def _add_token(
    store: ClusterStore, authority: bytes, role: HostRole, place: HostIdentity, uses: int, ttl_s: float, name: str = ""
) -> TokenText:
    text = new_token_text(authority_digest(authority))
    expires_at = int(time.time() + ttl_s)
    await store.add_token(JoinToken(text.id, text.digest, role, place.region, place.site, name, uses, expires_at))
    return text


def _with_store(config: Config, question: Callable[[StoreAccess], Awaitable[int | None]], makes: bool = False) -> int:
    try:
        return with_store_access(config, question, makes=makes)
    except IdentityError as error:
        return fail(str(error))


def _member_json(member: ClusterMember) -> dict[str, Any]:
    document: dict[str, Any] = msgspec.structs.asdict(member)
    return document


def _print_members(found: list[ClusterMember]) -> None:
    heads = ("ROLE", "NAME", "REGION", "SITE", "ADDRESS", "JOINED", "CERTIFICATE UNTIL")
    rows = []
    for each in found:
        place = (each.region or "-", each.site or "-")
        rows.append((each.role, each.name, *place, each.address, time_text(each.joined_at), time_text(each.expires_at)))
    print_table(heads, rows)


def _own_address() -> str:
    """The address that this host has on its way out; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
        except OSError:
            pass
    addresses = [
        each.address for links in psutil.net_if_addrs().values() for each in links if each.family == socket.AF_INET
    ]
    return next((address for address in addresses if not address.startswith("127.")), "127.0.0.1")
