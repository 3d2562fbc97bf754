"""Decodes a request's images in a process of their own, which ends with them: no image is decoded beside requests.

It knows no models beyond the size that one takes, and no accounts.
"""

import asyncio
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from gateway.errors import bad_input
from gateway.images.source import ImageSource

PIXELS_MAX: Final = 40_000_000  # of one image
DECODE_S: Final = 10.0  # for all images of a request, once it is their turn
MEMORY_BYTES: Final = 1 << 30
PROCESSES_MAX: Final = 2  # at once
_PROGRAM: Final = Path(__file__).with_name("decode_program.py")


class DecodedImage(NamedTuple):
    """side · side pixels of red, green and blue, and the SHA-256 of them."""

    digest: bytes
    pixels: bytes


class ImageDecoder:
    """Decodes images, of a few requests at once."""

    def __init__(self, decode_s: float = DECODE_S, program: Path = _PROGRAM) -> None:
        self._decode_s = decode_s
        self._program = program
        self._turns = asyncio.Semaphore(PROCESSES_MAX)
        self._processes = 0

    @property
    def idle(self) -> bool:
        """Whether no process decodes."""
        return self._processes == 0

    async def decode(self, images: Sequence[ImageSource], side: int, resample: int) -> list[DecodedImage]:
        """All images, `side` pixels wide and high. Raises ApiError for the first that is not taken."""
        limits = [side, resample, PIXELS_MAX, max(1, int(self._decode_s)), MEMORY_BYTES]
        async with self._turns:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-I", str(self._program), *map(str, limits),
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
            )  # fmt: skip
            self._processes += 1
            decoded: list[DecodedImage] = []
            try:
                async with asyncio.timeout(self._decode_s), asyncio.TaskGroup() as tasks:
                    sending = tasks.create_task(_send(process, images))
                    problem = await _receive(process, images, side, decoded)
                    sending.cancel()
            except TimeoutError:
                problem = f"took longer than {self._decode_s:g} s to decode"
            finally:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
                self._processes -= 1
        if problem:
            field = images[len(decoded)].field
            raise bad_input(f"'{field}' {problem}", field)
        return decoded


async def _send(process: asyncio.subprocess.Process, images: Sequence[ImageSource]) -> None:
    assert process.stdin is not None
    with contextlib.suppress(ConnectionError):  # it has ended; what it answered says why
        for image in images:
            process.stdin.write(f"{image.media_type or '-'} {len(image.content)}\n".encode())
            process.stdin.write(image.content)
            await process.stdin.drain()
        process.stdin.close()


async def _receive(
    process: asyncio.subprocess.Process, images: Sequence[ImageSource], side: int, decoded: list[DecodedImage]
) -> str:
    """Adds each image as it comes. Returns what is wrong with the next one, or nothing."""
    assert process.stdout is not None
    try:
        for _ in images:
            head = (await process.stdout.readline()).decode("utf-8", "replace").rstrip("\n")
            word, _, rest = head.partition(" ")
            if word == "refused":
                return f"is not taken: {rest}"
            pixels = await process.stdout.readexactly(3 * side * side)
            decoded.append(DecodedImage(bytes.fromhex(rest), pixels))
    except (asyncio.IncompleteReadError, ValueError):
        return "could not be decoded: the process that tried has ended over it"
    return ""
