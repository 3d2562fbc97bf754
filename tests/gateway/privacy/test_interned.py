"""What libraries keep is overwritten: shown by what they then no longer have."""

import os
import socket
import subprocess
import sys

import msgspec
import pytest

from gateway.privacy.interned import overwrite_interned_keys
from tests.end_to_end.canary import Canaries

READER = """
import asyncio, socket, sys, uvloop
from gateway.privacy.interned import overwrite_read_buffer
from gateway.privacy.process import scrub_memory

scrub_memory()

async def main():
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=int(sys.argv[1])))
    await reader.readuntil(b"!")
    print("read", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    await overwrite_read_buffer()
    print("overwritten", flush=True)
    await asyncio.to_thread(sys.stdin.readline)

with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
    runner.run(main())
"""


def kept(key: bytes) -> str:
    """The text that msgspec makes of a key."""
    (found,) = msgspec.json.decode(b'{"%s":0}' % key)
    return str(found)


def test_msgspec_keeps_keys_until_they_are_overwritten() -> None:
    first = kept(b"canary")
    assert kept(b"canary") is first, "the control: it keeps them"
    overwrite_interned_keys()
    assert kept(b"canary") is not first


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read through /proc")
def test_uvloop_keeps_what_it_read_last_until_it_is_overwritten() -> None:
    canaries = Canaries(seed=11)
    ours, theirs = socket.socketpair()
    os.set_inheritable(theirs.fileno(), True)
    with subprocess.Popen(
        [sys.executable, "-c", READER, str(theirs.fileno())],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, close_fds=False,
    ) as child:  # fmt: skip
        assert child.stdin is not None
        assert child.stdout is not None
        ours.sendall(b"." * 30_000 + canaries.text("read").encode() + b"!")
        assert child.stdout.readline() == "read\n"
        assert list(canaries.in_memory(child.pid)) != [], "the control: it keeps it"
        child.stdin.write("\n")
        assert child.stdout.readline() == "overwritten\n"
        assert list(canaries.in_memory(child.pid)) == []
        child.stdin.write("\n")
    ours.close()
    theirs.close()
