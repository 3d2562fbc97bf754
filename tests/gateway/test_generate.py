import asyncio
from pathlib import Path

import uvloop

from tests.gateway.served import Client, served


def test_stream_is_authenticated_counted_and_done(tmp_path: Path) -> None:
    async def call() -> None:
        async with served(tmp_path) as gateway:
            client = await Client.connect(gateway.port)
            await client.post(gateway.run_path, {"prompt": "hello", "stream": True, "max_tokens": 5}, gateway.headers)
            assert await client.head() == 200
            events = [event async for event in client.events()]
            print(client.headers, events)
            assert events[-1] == "[DONE]"
            await gateway.settled()
            print(await gateway.records())
            client.leave()

    uvloop.run(call())
