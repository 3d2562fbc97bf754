"""The hosts of a cluster in the Redis store.

hearth:cluster            what was founded: the authority
hearth:cluster:tokens     hash: token id → JoinToken
hearth:cluster:uses       hash: token id → uses that are left
hearth:cluster:members    hash: member id → ClusterMember
hearth:cluster:removed    hash: key → when the certificate of its removed member expires
hearth:cluster:catalogue  hash: revision, document: the ClusterCatalogue
hearth:cluster:reports    hash: member id → HostCatalogue
"""

from collections.abc import Sequence
from typing import Final

import msgspec

from tenants.records.catalogue import ClusterCatalogue, HostCatalogue, decode_catalogue, encode_catalogue
from tenants.records.cluster import ClusterAuthority, ClusterMember, JoinOutcome, JoinToken
from tenants.store.redis.database import CLUSTER_KEY, RedisDatabase

_KEY: Final = CLUSTER_KEY
_TOKENS, _USES, _MEMBERS, _REMOVED = (f"{_KEY}:{part}" for part in ("tokens", "uses", "members", "removed"))
_CATALOGUE, _REPORTS = f"{_KEY}:catalogue", f"{_KEY}:reports"

# A member is a msgpack array: 5 is its key, 8 when its certificate expires (Lua counts from 1).
_ADMIT: Final = f"""
local token, id, key, now, document = unpack(ARGV)
if redis.call('HEXISTS', '{_REMOVED}', key) == 1 then return '{JoinOutcome.REMOVED_KEY}' end
local before = redis.call('HGET', '{_MEMBERS}', id)
local member = before and cmsgpack.unpack(before)
local again = member and member[5] == key
if member and not again and member[8] > tonumber(now) then return '{JoinOutcome.NAME_TAKEN}' end
local uses = tonumber(redis.call('HGET', '{_USES}', token))
if not uses then return '{JoinOutcome.UNKNOWN_TOKEN}' end
if not again then
    if uses < 1 then return '{JoinOutcome.USED_TOKEN}' end
    redis.call('HINCRBY', '{_USES}', token, -1)
end
redis.call('HSET', '{_MEMBERS}', id, document)
return '{JoinOutcome.ADMITTED}'
"""
_RENEW: Final = f"""
local before = redis.call('HGET', '{_MEMBERS}', ARGV[1])
if not before or cmsgpack.unpack(before)[5] ~= ARGV[2] then return 0 end
redis.call('HSET', '{_MEMBERS}', ARGV[1], ARGV[3])
return 1
"""
_RESTORE: Final = f"""
local id, key, now, document = unpack(ARGV)
if redis.call('HEXISTS', '{_REMOVED}', key) == 1 or redis.call('EXISTS', '{_KEY}') == 0 then return 0 end
local before = redis.call('HGET', '{_MEMBERS}', id)
local member = before and cmsgpack.unpack(before)
if member and (member[5] == key or member[8] > tonumber(now)) then return 0 end
redis.call('HSET', '{_MEMBERS}', id, document)
return 1
"""
_REMOVE: Final = f"""
local before = redis.call('HGET', '{_MEMBERS}', ARGV[1])
if not before then return 0 end
local member = cmsgpack.unpack(before)
redis.call('HDEL', '{_MEMBERS}', ARGV[1])
redis.call('HDEL', '{_REPORTS}', ARGV[1])
redis.call('HSET', '{_REMOVED}', member[5], string.format('%d', member[8]))
return 1
"""

_PUT: Final = f"""
if (redis.call('HGET', '{_CATALOGUE}', 'revision') or '') ~= ARGV[1] then return 0 end
redis.call('HSET', '{_CATALOGUE}', 'revision', ARGV[2], 'document', ARGV[3])
return 1
"""
_REPORT: Final = f"""
if redis.call('HEXISTS', '{_MEMBERS}', ARGV[1]) == 0 then return 0 end
redis.call('HSET', '{_REPORTS}', ARGV[1], ARGV[2])
return 1
"""

_pack = msgspec.msgpack.Encoder().encode
_unpack_member = msgspec.msgpack.Decoder(ClusterMember).decode
_unpack_report = msgspec.msgpack.Decoder(HostCatalogue).decode


class RedisClusterStore:
    """See ClusterStore."""

    def __init__(self, database: RedisDatabase) -> None:
        self._database = database

    async def found(self, authority: ClusterAuthority) -> bool:
        return bool(await self._database.ask("SETNX", _KEY, _pack(authority)))

    async def authority(self) -> ClusterAuthority | None:
        document = await self._database.ask("GET", _KEY)
        return None if document is None else msgspec.msgpack.decode(document, type=ClusterAuthority)

    async def add_token(self, token: JoinToken) -> None:
        await self._database.ask_all(
            ("HSETNX", _USES, token.id, token.uses), ("HSETNX", _TOKENS, token.id, _pack(token))
        )

    async def token(self, token_id: str) -> JoinToken | None:
        document = await self._database.ask("HGET", _TOKENS, token_id)
        return None if document is None else msgspec.msgpack.decode(document, type=JoinToken)

    async def admit(self, token_id: str, member: ClusterMember, now_s: int) -> JoinOutcome:
        arguments = (token_id, member.id, member.key, now_s, _pack(member))
        return JoinOutcome((await self._database.run_script_once(_ADMIT, _KEY, *arguments)).decode())

    async def renew(self, member: ClusterMember) -> bool:
        arguments = (member.id, member.key, _pack(member))
        return bool(await self._database.run_script_once(_RENEW, _KEY, *arguments))

    async def restore(self, member: ClusterMember, now_s: int) -> bool:
        arguments = (member.id, member.key, now_s, _pack(member))
        return bool(await self._database.run_script_once(_RESTORE, _KEY, *arguments))

    async def remove(self, member_id: str) -> bool:
        return bool(await self._database.run_script_once(_REMOVE, _KEY, member_id))

    async def members(self) -> Sequence[ClusterMember]:
        (documents,) = await self._database.read(("HVALS", _MEMBERS))
        return sorted(map(_unpack_member, documents), key=lambda member: member.id)

    async def removed_keys(self, now_s: int) -> Sequence[str]:
        (removed,) = await self._database.read(("HGETALL", _REMOVED))
        return sorted(key.decode() for key, until in removed.items() if int(until) > now_s)

    async def catalogue(self, known: str = "") -> ClusterCatalogue | None:
        if known and await self._database.ask("HGET", _CATALOGUE, "revision") == known.encode():
            return None
        document = await self._database.ask("HGET", _CATALOGUE, "document")
        return ClusterCatalogue() if document is None else decode_catalogue(document)

    async def put_catalogue(self, catalogue: ClusterCatalogue, before: str) -> bool:
        arguments = (before, catalogue.revision, encode_catalogue(catalogue))
        return bool(await self._database.run_script_once(_PUT, _KEY, *arguments))

    async def report_catalogue(self, report: HostCatalogue) -> None:
        await self._database.run_script_once(_REPORT, _KEY, report.member_id, _pack(report))

    async def catalogue_reports(self) -> Sequence[HostCatalogue]:
        (documents,) = await self._database.read(("HVALS", _REPORTS))
        return sorted(map(_unpack_report, documents), key=lambda report: report.member_id)
