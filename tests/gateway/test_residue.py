"""What libraries keep is overwritten: shown by what they then no longer have."""

import asyncio
import gc
import os
import socket
import sys

import msgspec
import pytest
import uvloop

from gateway.residue import overwrite_keys, overwrite_reads
from tests.end_to_end.canary import mappings, read_memory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is read through /proc")


def kept(key: bytes) -> str:
    """The text that msgspec makes of a key."""
    (found,) = msgspec.json.decode(b'{"%s":0}' % key)
    return str(found)


def test_msgspec_keeps_keys_until_they_are_overwritten() -> None:
    first = kept(b"canary")
    assert kept(b"canary") is first, "the control: it keeps them"
    overwrite_keys()
    assert kept(b"canary") is not first


def times_in_memory(text: bytes) -> int:
    """In this process; `text` itself and what reads it are some."""
    gc.collect()
    spans = [(start, end) for _, start, end in mappings(os.getpid()) if end - start < 64 << 20]
    return sum(piece.count(text) for start, end in spans for piece in read_memory(os.getpid(), start, end))


def test_what_uvloop_read_last_is_overwritten() -> None:
    marks = [os.urandom(24) for _ in range(200)]

    async def main() -> tuple[int, int]:
        ours, theirs = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=ours)
        theirs.sendall(b"".join(marks))
        await reader.readexactly(24 * len(marks))
        seam = marks[100][12:] + marks[101][:12]  # what nobody wrote down but where they were read
        before = times_in_memory(seam)
        await overwrite_reads()
        after = times_in_memory(seam)
        writer.close()
        theirs.close()
        return before, after

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        before, after = runner.run(main())
    assert after < before
