"""A TCP line through user space that delays and ends TLS: a store that is far away. It knows no commands.

python -m tests.support.relay TARGET_PORT DELAY_S [CERTIFICATE KEY]        prints its port; each way takes DELAY_S

It is a process, so that its timers do not wait for what a test computes. On SIGUSR1 each way takes LONGER_S more.
"""

import asyncio
import contextlib
import signal
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
LONGER_S = 0.08


@contextlib.contextmanager
def relay(target_port: int, delay_s: float = 0.0, tls: dict[str, str] | None = None) -> "Iterator[tuple[int, Relay]]":
    """The port of 127.0.0.1 that it listens on; `tls` as tests.support.certificates makes it."""
    files = [tls["certificate"], tls["key"]] if tls else []
    command = [sys.executable, "-m", "tests.support.relay", str(target_port), str(delay_s), *files]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield int(process.stdout.readline()), Relay(process)
        finally:
            process.kill()


class Relay:
    """The process from outside."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def lengthen(self) -> None:
        self._process.send_signal(signal.SIGUSR1)


class _Line:
    def __init__(self, target_port: int, delay_s: float) -> None:
        self._target_port = target_port
        self._delay_s = delay_s

    async def join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            target_reader, target = await asyncio.open_connection("127.0.0.1", self._target_port)
        except OSError:
            writer.transport.abort()
            return
        await asyncio.gather(self._carry(reader, target), self._carry(target_reader, writer))

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            while piece := await reader.read(1 << 16):
                loop.call_later(self._delay_s, writer.write, piece)
        loop.call_later(self._delay_s, writer.close)

    def lengthen(self) -> None:
        self._delay_s += LONGER_S


async def _main(target_port: int, delay_s: float, *files: str) -> None:
    line, loop, context = _Line(target_port, delay_s), asyncio.get_running_loop(), None
    if files:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(*files)
    loop.add_signal_handler(signal.SIGUSR1, line.lengthen)
    server = await asyncio.start_server(line.join, "127.0.0.1", 0, ssl=context)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_main(int(sys.argv[1]), float(sys.argv[2]), *sys.argv[3:]))
