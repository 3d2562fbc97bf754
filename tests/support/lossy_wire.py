"""An Ethernet link through user space that loses and delays packets, each way for itself: kernels without netem have no
other. It knows no protocol.

python -m tests.support.lossy_wire TAP TAP      makes both devices; a line `LOSS_THERE LOSS_BACK DELAY_S` sets them
"""

import asyncio
import contextlib
import fcntl
import os
import random
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
_TUNSETIFF: Final = 0x400454CA
_TAP_WITHOUT_HEADER: Final = 0x1002
_FRAME_BYTES: Final = 1 << 16


class LossyWire:
    """The process from outside. `there` is from the first device to the second."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def set(self, *, there: float = 0.0, back: float = 0.0, delay_s: float = 0.0) -> None:
        """Shares of packets that are lost, and what each of the others takes; returns once it is so."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{there} {back} {delay_s}\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "set\n"


@contextlib.contextmanager
def lossy_wire(first: str, second: str) -> Iterator[LossyWire]:
    """Two devices that are one wire, for as long as the context is open."""
    command = [sys.executable, "-m", "tests.support.lossy_wire", first, second]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield LossyWire(process)
        finally:
            process.kill()


class _End:
    """One device: what it sends goes out of the other one, unless it is lost. The seed is fixed."""

    def __init__(self, name: str) -> None:
        self._tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(self._tap, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _TAP_WITHOUT_HEADER))
        self._dice = random.Random(name)
        self.loss = self.delay_s = 0.0

    def carry_to(self, other: "_End") -> None:
        asyncio.get_running_loop().add_reader(self._tap, self._carry, other)

    def _carry(self, other: "_End") -> None:
        frame = os.read(self._tap, _FRAME_BYTES)
        if self._dice.random() < self.loss:
            return
        if self.delay_s:
            asyncio.get_running_loop().call_later(self.delay_s, other.send, frame)
        else:
            other.send(frame)

    def send(self, frame: bytes) -> None:
        with contextlib.suppress(OSError):  # a device that is down, or whose queue is full, loses it
            os.write(self._tap, frame)


async def main(first: str, second: str) -> None:
    """Carries until killed."""
    there, back = _End(first), _End(second)
    there.carry_to(back)
    back.carry_to(there)

    def obey() -> None:
        there.loss, back.loss, there.delay_s = map(float, sys.stdin.readline().split())
        back.delay_s = there.delay_s
        print("set", flush=True)

    asyncio.get_running_loop().add_reader(sys.stdin, obey)
    print("ready", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main(*sys.argv[1:]))
