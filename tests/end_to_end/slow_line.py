"""A process between gateways and Redis that lets every answer wait while it is told to. It knows no commands.

python -m tests.end_to_end.slow_line PORT REDIS_PORT        SIGUSR1: answers wait for SLOW_S; SIGUSR2: no more
"""

import asyncio
import contextlib
import signal
import sys
from typing import Final

import uvloop

SLOW_S: Final = 2.0


class Line:
    """`delay_s` is how long each answer waits from now on."""

    def __init__(self, redis_port: int) -> None:
        self._redis_port = redis_port
        self.delay_s = 0.0

    async def join(self, gateway_reader: asyncio.StreamReader, gateway: asyncio.StreamWriter) -> None:
        """Carries one connection until either end closes it."""
        try:
            redis_reader, redis = await asyncio.open_connection("127.0.0.1", self._redis_port)
        except OSError:
            gateway.transport.abort()
            return
        asking = asyncio.create_task(carry(gateway_reader, redis))
        await self._answer(redis_reader, gateway)
        await asking

    async def _answer(self, redis_reader: asyncio.StreamReader, gateway: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while piece := await redis_reader.read(1 << 16):
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                gateway.write(piece)
        gateway.transport.abort()


async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while piece := await reader.read(1 << 16):
            writer.write(piece)
    writer.close()


async def main(port: int, redis_port: int) -> None:
    """Serves until killed; says `ready` once it does."""
    line, loop = Line(redis_port), asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, setattr, line, "delay_s", SLOW_S)
    loop.add_signal_handler(signal.SIGUSR2, setattr, line, "delay_s", 0.0)
    server = await asyncio.start_server(line.join, "127.0.0.1", port)
    print("ready", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(main(int(sys.argv[1]), int(sys.argv[2])))
