"""The gateway's side of joining: who may become a member, which certificate a member gets, and whose keys are removed.
It does not know how questions arrive."""

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from msgspec import structs

from gateway.identity.authority import (
    CERTIFICATE_S,
    SKEW_S,
    CertificateAuthority,
    authority_digest,
    key_digest,
    requested_key,
    seal_to,
)
from gateway.identity.host_identity import HostIdentity, HostRole, IdentityError
from gateway.joining.messages import AuthorityQuestion, JoinAnswer, JoinMessage, JoinRequest, NewsQuestion, RenewRequest
from gateway.joining.token_text import TokenText, TokenTextError, parse_token_text
from tenants.records.catalogue import HostCatalogue
from tenants.records.cluster import ClusterMember, JoinOutcome, JoinToken
from tenants.store.protocol import ClusterStore

_PROBLEMS: Final = {
    JoinOutcome.UNKNOWN_TOKEN: "there is no such token to join: `hearth cluster token` makes one",
    JoinOutcome.USED_TOKEN: "the token to join is used up: `hearth cluster token` makes another, --uses says for how "
    "many hosts",
    JoinOutcome.REMOVED_KEY: "this host's key was removed from the cluster: delete its folder `identity` and join "
    "with a new token",
}


Note = Callable[..., Awaitable[object]]  # of (actor, action, target, **detail)
Catalogue = Callable[[str, HostCatalogue | None, str], Awaitable[bytes]]  # see CatalogueWatch.answer


class JoinError(Exception):
    """The host may not become, or is not, a member; the message says why and what to do."""


class JoinService:
    """Answers hosts. `secret` is the server's; `members` and `removed_keys` are of the last look at the store, and so
    is the `catalogue`; `note` writes into the audit log who joined."""

    def __init__(
        self,
        store: ClusterStore,
        authority: CertificateAuthority,
        secret: bytes,
        members: Callable[[], Sequence[ClusterMember]],
        removed_keys: Callable[[], Sequence[str]],
        clock: Callable[[], float] = time.time,
        catalogue: Catalogue | None = None,
        note: Note | None = None,
    ) -> None:
        self._store = store
        self._note = note
        self._catalogue = catalogue
        self._authority = authority
        self._secret = secret
        self._members = members
        self._removed_keys = removed_keys
        self._clock = clock

    async def answer(self, question: JoinMessage, peer: HostIdentity | None, key: str, address: str) -> JoinAnswer:
        """What to say to a peer at this IP address, whose certificate, if it showed one, is of this key. Raises
        StoreUnavailable."""
        try:
            match question:
                case AuthorityQuestion():
                    return JoinAnswer(authority=self._authority.pem)
                case JoinRequest():
                    return await self._join(question, address)
                case RenewRequest():
                    return await self._renew(question, self._member(peer, key), key, address)
                case NewsQuestion():
                    member = self._member(peer, key)
                    await self._note_address(member, key, _reached(question.address, address))
                    return await self._news(question, member)
        except (JoinError, IdentityError, TokenTextError) as error:
            return JoinAnswer(problem=str(error))

    async def _news(self, question: NewsQuestion, member: HostIdentity) -> JoinAnswer:
        mirror = b""
        if self._catalogue is not None:
            mirror = await self._catalogue(member.member_id, question.has, question.known)
        gateways = gateway_addresses(self._members(), self._clock())
        return JoinAnswer(removed=list(self._removed_keys()), gateways=gateways, mirror=mirror)

    def _member(self, peer: HostIdentity | None, key: str) -> HostIdentity:
        if peer is None:
            raise JoinError("only members may ask this, and this connection shows no certificate of one")
        if key in self._removed_keys():
            raise JoinError(_PROBLEMS[JoinOutcome.REMOVED_KEY])
        return peer

    async def _join(self, request: JoinRequest, address: str) -> JoinAnswer:
        public_key, text = requested_key(request.signing_request), parse_token_text(request.token)
        now_s = int(self._clock())
        token = await self._open_token(text, now_s)
        if request.role != token.role:
            raise JoinError(f"the token is for a {token.role}, and this host is to be a {request.role}")
        if token.name and request.name != token.name:
            raise JoinError(f"the token is for a host named {token.name}, and this one is named {request.name}")
        role = HostRole(token.role)
        identity = HostIdentity(self._authority.cluster, role, request.name, token.region, token.site)
        member = ClusterMember(
            identity.name,
            role,
            identity.region,
            identity.site,
            key_digest(public_key),
            _reached(request.address, address),
            now_s,
            now_s + CERTIFICATE_S,
        )
        outcome = await self._store.admit(token.id, member, now_s - SKEW_S)  # by no host's clock the name's may hold
        if outcome is JoinOutcome.NAME_TAKEN:
            raise JoinError(
                f"there is a {role} named {identity.name} already: give this host another --name, or remove that one "
                f"with `hearth cluster remove {member.id}`"
            )
        if outcome is not JoinOutcome.ADMITTED:
            raise JoinError(_PROBLEMS[outcome])
        if self._note is not None:
            await self._note(token.id, "cluster.join", member.id, region=member.region, site=member.site)
        sealed = seal_to(public_key, self._secret) if role is HostRole.GATEWAY else b""
        certificate = self._authority.sign(public_key, identity, now_s)
        return JoinAnswer(authority=self._authority.pem, certificate=certificate, sealed_secret=sealed)

    async def _open_token(self, text: TokenText, now_s: int) -> JoinToken:
        token = await self._store.token(text.id)
        if token is None or not text.opens(token) or text.authority != authority_digest(self._authority.pem):
            raise JoinError(_PROBLEMS[JoinOutcome.UNKNOWN_TOKEN])
        if token.expires_at <= now_s:
            raise JoinError("the token to join has expired: `hearth cluster token --ttl` makes one that lasts longer")
        return token

    async def _note_address(self, peer: HostIdentity, key: str, reached: str) -> None:
        """Stores where a member is reached now, where that changed since it joined, and who the store has lost."""
        known = {member.id: member for member in self._members()}
        member = known.get(peer.member_id)
        if member is None and known:
            await self._restore(peer, key, reached)
        elif member is not None and member.key == key and member.address != reached:
            await self._store.renew(structs.replace(member, address=reached))

    async def _restore(self, peer: HostIdentity, key: str, reached: str) -> ClusterMember | None:
        """The record of a member whose certificate holds, as it said it again; None where it is no member any more. A
        store that failed over may have lost whom it admitted last."""
        now_s = int(self._clock())
        expires_at = now_s + CERTIFICATE_S
        member = ClusterMember(peer.name, peer.role, peer.region, peer.site, key, reached, now_s, expires_at)
        if not await self._store.restore(member, now_s - SKEW_S):
            return None
        if self._note is not None:
            await self._note(peer.member_id, "cluster.restore", member.id, region=member.region, site=member.site)
        return member

    async def _renew(self, request: RenewRequest, peer: HostIdentity, key: str, address: str) -> JoinAnswer:
        """The place is the one that the store knows, whatever the certificate of before says."""
        public_key = requested_key(request.signing_request)
        if key_digest(public_key) != key:
            raise JoinError("the signing request is of another key than the connection's certificate")
        members = {member.id: member for member in await self._store.members()}
        before = members.get(peer.member_id)
        now_s = int(self._clock())
        expires_at = now_s + CERTIFICATE_S
        reached = _reached(request.address, address)
        if before is None:
            before = await self._restore(peer, key, reached)
        renewed = before and structs.replace(before, key=key, address=reached, expires_at=expires_at)
        if before is None or renewed is None or not await self._store.renew(renewed):
            raise JoinError(f"{peer} is no member any more: it was removed, or joined anew with another key")
        identity = HostIdentity(self._authority.cluster, peer.role, before.name, before.region, before.site)
        return JoinAnswer(certificate=self._authority.sign(public_key, identity, now_s))


def gateway_addresses(members: Sequence[ClusterMember], now: float) -> list[str]:
    """Where hosts join and renew: at gateways whose certificates hold."""
    return [member.address for member in members if member.role == HostRole.GATEWAY and member.expires_at > now]


def _reached(told: str, seen: str) -> str:
    """HOST:PORT where a host is reached: what it told, its host the one that was seen where it told none."""
    host, _, port = told.rpartition(":")
    if not port.isdigit():
        raise JoinError(f"{told!r} is no HOST:PORT: [cluster] address of that host is to be a name or an IP address")
    if not host:
        host = f"[{seen}]" if ":" in seen else seen
    return f"{host}:{port}"
