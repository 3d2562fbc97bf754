"""Notices that wait for delivery in the Redis store."""

from collections.abc import Sequence
from typing import Final

import msgspec
from msgspec import structs

from tenants.records.notices import Notice
from tenants.store.protocol import RETENTION_DAYS
from tenants.store.redis import scripts
from tenants.store.redis.database import RedisDatabase

_NOTICES: Final = "hearth:notices"

_pack = msgspec.msgpack.Encoder().encode
_unpack_notice = msgspec.msgpack.Decoder(Notice).decode


class RedisNoticeStore:
    """See NoticeStore."""

    def __init__(self, database: RedisDatabase) -> None:
        self._database = database

    async def add(self, notice: Notice) -> None:
        await self._database.ask("HSETNX", f"{_NOTICES}:bodies", notice.id, _pack(notice))
        if await self._database.ask("SET", f"hearth:notice:{notice.id}", "", "NX", "EX", RETENTION_DAYS * 86_400):
            await self._database.ask("ZADD", _NOTICES, notice.due_at, notice.id)
        elif not await self._database.ask("ZSCORE", _NOTICES, notice.id):
            await self._database.ask("HDEL", f"{_NOTICES}:bodies", notice.id)  # it was closed

    async def claim(self, now: float, lease_s: float, limit: int) -> Sequence[Notice]:
        window = (now, now + lease_s)
        claimed = await self._database.run_script_once(scripts.CLAIM_NOTICES, _NOTICES, 0, *window, limit)
        pairs = zip(claimed[::2], claimed[1::2], strict=True)
        return [structs.replace(_unpack_notice(body), tries=tries) for body, tries in pairs if body is not None]

    async def postpone(self, notice_id: str, due_at: float) -> None:
        await self._database.ask("ZADD", _NOTICES, "XX", due_at, notice_id)

    async def close(self, notice_id: str) -> None:
        await self._database.ask_all(
            ("ZREM", _NOTICES, notice_id),
            ("HDEL", f"{_NOTICES}:bodies", notice_id),
            ("HDEL", f"{_NOTICES}:tries", notice_id),
        )
