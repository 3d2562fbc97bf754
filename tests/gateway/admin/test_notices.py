"""The key of an account's notices opens what is really sent."""

import asyncio
import base64
import hmac
from pathlib import Path

from tenants.records.limits import Limits
from tests.support.admin_api import served_admin
from tests.support.served_gateway import looped


@looped
async def test_the_key_that_is_shown_is_the_one_that_signs(tmp_path: Path) -> None:
    received: asyncio.Queue[bytes] = asyncio.Queue()

    async def receive(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        received.put_nowait(head + await reader.readexactly(length))
        writer.write(b"HTTP/1.1 204 No Content\r\ncontent-length: 0\r\n\r\n")
        await writer.drain()
        writer.close()

    limits = Limits(neurons_per_day=0.02)
    server = await asyncio.start_server(receive, "127.0.0.1", 0)
    async with server, served_admin(tmp_path, limits=limits, private_notices=True) as house:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/hook"
        changed = await house.ask("PATCH", house.account, {"settings": {"notices": {"url": url, "at": [0.1]}}})
        assert changed.status == 200, changed.content
        shown = (await house.ask("GET", f"{house.account}/notices/key")).json["result"]["key"]
        house.gateway.see_changes()
        assert (await house.gateway.run(prompt="hello", max_tokens=2)).status == 200
        async with asyncio.timeout(15):
            head, _, body = (await received.get()).partition(b"\r\n\r\n")
        headers = dict(line.split(": ", 1) for line in head.decode().lower().split("\r\n")[1:])
        signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
        key = base64.b64decode(shown.removeprefix("whsec_"))
        wanted = f"v1,{base64.b64encode(hmac.digest(key, signed, 'sha256')).decode()}"
        assert wanted.lower() == headers["webhook-signature"]
