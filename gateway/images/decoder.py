"""Decodes a request's images in a process of their own, which ends with them: no image is decoded beside requests.

It knows no models beyond the sizes that one takes, and no accounts.
"""

import asyncio
import contextlib
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from gateway.errors import bad_input
from gateway.images.source import ImageSource
from gateway.images.tiling import PictureLayout

PIXELS_MAX: Final = 40_000_000  # of one image
DECODE_S: Final = 10.0  # for all images of a request, once it is their turn
MEMORY_BYTES: Final = 1 << 30
PROCESSES_MAX: Final = 2  # at once
_PROGRAM: Final = Path(__file__).with_name("decode_program.py")

T = TypeVar("T")


class DecodedImage(NamedTuple):
    """side · side pixels of red, green and blue, and the SHA-256 of them."""

    digest: bytes
    pixels: bytes


class ImageDecoder:
    """Measures and decodes images, of a few requests at once."""

    def __init__(self, decode_s: float = DECODE_S, program: Path = _PROGRAM) -> None:
        self._decode_s = decode_s
        self._program = program
        self._turns = asyncio.Semaphore(PROCESSES_MAX)
        self._processes = 0

    @property
    def idle(self) -> bool:
        """Whether no process decodes."""
        return self._processes == 0

    async def measure(self, images: Sequence[ImageSource]) -> list[tuple[int, int]]:
        """The width and height of each, as it is seen upright. Raises ApiError for the first that is not taken."""

        async def receive(answers: asyncio.StreamReader, _: int) -> tuple[int, int]:
            width, height = map(int, (await _answer(answers, "size")).split())
            return width, height

        return await self._run(images, [""] * len(images), (1, 0), receive)

    async def decode(
        self, images: Sequence[ImageSource], layouts: Sequence[PictureLayout], side: int, resample: int
    ) -> list[DecodedImage]:
        """The tiles of all images, `side` pixels wide and high. Raises ApiError for the first image that is not
        taken."""

        async def receive(answers: asyncio.StreamReader, index: int) -> list[DecodedImage]:
            return [await receive_tile(answers) for _ in range(layouts[index].tiles)]

        async def receive_tile(answers: asyncio.StreamReader) -> DecodedImage:
            digest = bytes.fromhex(await _answer(answers, "ok"))
            return DecodedImage(digest, await answers.readexactly(3 * side * side))

        tails = [" ".join(map(str, ("", *layout[:-1], *(layout.size or ())))) for layout in layouts]
        decoded = await self._run(images, tails, (side, resample), receive)
        return [tile for tiles in decoded for tile in tiles]

    async def _run(
        self, images: Sequence[ImageSource], tails: Sequence[str], scaling: tuple[int, int],
        receive: Callable[[asyncio.StreamReader, int], Awaitable[T]],
    ) -> list[T]:  # fmt: skip
        """What the program answers to each image and the tail of its line. Raises ApiError for the first that is not
        taken."""
        limits = [*scaling, PIXELS_MAX, max(1, int(self._decode_s)), MEMORY_BYTES]
        async with self._turns:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-I", str(self._program), *map(str, limits),
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
            )  # fmt: skip
            assert process.stdout is not None
            self._processes += 1
            answered: list[T] = []
            problem = ""
            try:
                async with asyncio.timeout(self._decode_s), asyncio.TaskGroup() as tasks:
                    sending = tasks.create_task(_send(process, images, tails))
                    try:
                        while len(answered) < len(images):
                            answered.append(await receive(process.stdout, len(answered)))
                    except _Refused as refused:
                        problem = f"is not taken: {refused}"
                    except (asyncio.IncompleteReadError, ValueError):
                        problem = "could not be decoded: the process that tried has ended over it"
                    sending.cancel()
            except TimeoutError:
                problem = f"took longer than {self._decode_s:g} s to decode"
            finally:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
                self._processes -= 1
        if problem:
            field = images[len(answered)].field
            raise bad_input(f"'{field}' {problem}", field)
        return answered


class _Refused(Exception):
    """What the program says of an image that it does not take."""


async def _send(process: asyncio.subprocess.Process, images: Sequence[ImageSource], tails: Sequence[str]) -> None:
    assert process.stdin is not None
    with contextlib.suppress(ConnectionError):  # it has ended; what it answered says why
        for image, tail in zip(images, tails, strict=True):
            process.stdin.write(f"{image.media_type or '-'} {len(image.content)}{tail}\n".encode())
            process.stdin.write(image.content)
            await process.stdin.drain()
        process.stdin.close()


async def _answer(answers: asyncio.StreamReader, expected: str) -> str:
    """What follows the word of the next line. Raises _Refused, and ValueError for any other word."""
    word, _, rest = (await answers.readline()).decode("utf-8", "replace").rstrip("\n").partition(" ")
    if word == "refused":
        raise _Refused(rest)
    if word != expected:
        raise ValueError(word)
    return rest
