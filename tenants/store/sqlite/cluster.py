"""The hosts of a cluster in the SQLite store."""

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from tenants.records.catalogue import ClusterCatalogue, HostCatalogue, decode_catalogue, encode_catalogue
from tenants.records.cluster import ClusterAuthority, ClusterMember, JoinOutcome, JoinToken
from tenants.store.sqlite.file import SqliteFile

_AUTHORITY: Final = "authority"
_TOKEN: Final = "token"
_MEMBER: Final = "member"
_REMOVED: Final = "removed"
_CATALOGUE: Final = "catalogue"
_REPORT: Final = "report"

_pack = msgspec.msgpack.Encoder().encode
_unpack_member = msgspec.msgpack.Decoder(ClusterMember).decode
_unpack_report = msgspec.msgpack.Decoder(HostCatalogue).decode


class SqliteClusterStore:
    """See ClusterStore. A removed member's document is kept under its key."""

    def __init__(self, file: SqliteFile) -> None:
        self._file = file

    async def found(self, authority: ClusterAuthority) -> bool:
        return self._add(_AUTHORITY, "", authority)

    async def authority(self) -> ClusterAuthority | None:
        document = self._document(_AUTHORITY, "")
        return None if document is None else msgspec.msgpack.decode(document, type=ClusterAuthority)

    async def add_token(self, token: JoinToken) -> None:
        self._add(_TOKEN, token.id, token, token.uses)

    async def token(self, token_id: str) -> JoinToken | None:
        document = self._document(_TOKEN, token_id)
        return None if document is None else msgspec.msgpack.decode(document, type=JoinToken)

    async def admit(self, token_id: str, member: ClusterMember, now_s: int) -> JoinOutcome:
        with self._file.transaction():
            if self._document(_REMOVED, member.key) is not None:
                return JoinOutcome.REMOVED_KEY
            document = self._document(_MEMBER, member.id)
            before = None if document is None else _unpack_member(document)
            again = before is not None and before.key == member.key
            if before is not None and not again and before.expires_at > now_s:
                return JoinOutcome.NAME_TAKEN
            uses = self._file.run("SELECT uses FROM cluster WHERE kind = ? AND id = ?", (_TOKEN, token_id)).fetchone()
            if uses is None:
                return JoinOutcome.UNKNOWN_TOKEN
            if not again:
                if uses[0] < 1:
                    return JoinOutcome.USED_TOKEN
                self._file.run("UPDATE cluster SET uses = uses - 1 WHERE kind = ? AND id = ?", (_TOKEN, token_id))
            self._put(member)
        return JoinOutcome.ADMITTED

    async def renew(self, member: ClusterMember) -> bool:
        with self._file.transaction():
            document = self._document(_MEMBER, member.id)
            if document is None or _unpack_member(document).key != member.key:
                return False
            self._put(member)
        return True

    async def restore(self, member: ClusterMember, now_s: int) -> bool:
        with self._file.transaction():
            gone = self._document(_REMOVED, member.key) is not None or self._document(_AUTHORITY, "") is None
            document = self._document(_MEMBER, member.id)
            before = None if document is None else _unpack_member(document)
            if gone or (before is not None and (before.key == member.key or before.expires_at > now_s)):
                return False
            self._put(member)
        return True

    async def remove(self, member_id: str) -> bool:
        with self._file.transaction():
            document = self._document(_MEMBER, member_id)
            if document is None:
                return False
            for kind in (_MEMBER, _REPORT):
                self._file.run("DELETE FROM cluster WHERE kind = ? AND id = ?", (kind, member_id))
            self._replace(_REMOVED, _unpack_member(document).key, document)
        return True

    async def members(self) -> Sequence[ClusterMember]:
        return self._all(_MEMBER)

    async def removed_keys(self, now_s: int) -> Sequence[str]:
        return [member.key for member in self._all(_REMOVED) if member.expires_at > now_s]

    async def catalogue(self, known: str = "") -> ClusterCatalogue | None:
        catalogue = self._catalogue()
        return None if known and catalogue.revision == known else catalogue

    async def put_catalogue(self, catalogue: ClusterCatalogue, before: str) -> bool:
        document = encode_catalogue(catalogue)
        with self._file.transaction():
            if self._catalogue().revision != before:
                return False
            self._replace(_CATALOGUE, "", document)
        return True

    async def report_catalogue(self, report: HostCatalogue) -> None:
        with self._file.transaction():
            if self._document(_MEMBER, report.member_id) is not None:
                self._replace(_REPORT, report.member_id, _pack(report))

    async def catalogue_reports(self) -> Sequence[HostCatalogue]:
        rows = self._file.rows("SELECT document FROM cluster WHERE kind = ? ORDER BY id", _REPORT)
        return [_unpack_report(document) for (document,) in rows]

    def _catalogue(self) -> ClusterCatalogue:
        document = self._document(_CATALOGUE, "")
        return ClusterCatalogue() if document is None else decode_catalogue(document)

    def _all(self, kind: str) -> list[ClusterMember]:
        rows = self._file.rows("SELECT document FROM cluster WHERE kind = ? ORDER BY id", kind)
        return [_unpack_member(document) for (document,) in rows]

    def _document(self, kind: str, id: str) -> bytes | None:
        rows = self._file.rows("SELECT document FROM cluster WHERE kind = ? AND id = ?", kind, id)
        return rows[0][0] if rows else None

    def _add(self, kind: str, id: str, document: Any, uses: int = 0) -> bool:
        insert = "INSERT INTO cluster VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING"
        return bool(self._file.write(insert, kind, id, _pack(document), uses))

    def _put(self, member: ClusterMember) -> None:
        self._replace(_MEMBER, member.id, _pack(member))

    def _replace(self, kind: str, id: str, document: bytes) -> None:
        self._file.run("REPLACE INTO cluster VALUES (?, ?, ?, 0)", (kind, id, document))
