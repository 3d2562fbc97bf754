"""Sequences that move between two real CPU replicas of the built-in model, under load and over a slow link, held
against those that never move; how fast blocks go over a socket, beside what the socket itself carries; and between two
GPUs how fast a prompt's KV goes, and what prompts and answers apart are worth.

    python benchmarks/engine/handovers.py --part moves [--moves 10000] [--seed 21] [--stamps]
    python benchmarks/engine/handovers.py --part tcp
    python benchmarks/engine/handovers.py --part nixl                   # UCX_TLS and UCX_NET_DEVICES say over what
    python benchmarks/engine/handovers.py --part probe                  # can a process map a GPU that it does not see?
    python benchmarks/engine/handovers.py --part gpu [--device cpu]
    python benchmarks/engine/handovers.py --part pd [--device cpu]
"""

import argparse
import os
import random
import secrets
import signal
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from importlib.resources import files
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.engine.moving.apart import apart
from benchmarks.engine.moving.one_prompt import one_prompt
from benchmarks.engine.moving.probe import probe
from benchmarks.record import record
from engine.handover.dial import dial
from engine.handover.fabric import FabricEndpoints
from engine.handover.receiver import BlockFormat, HandoverReceiver
from engine.handover.sender import HandoverPlan, HandoverState, OutgoingHandover
from engine.handover.staging import StagingArea
from engine.handover.transport import HostPiece
from engine.protocol.frames import Submit
from engine.protocol.specs import ModelSpec
from engine.protocol.types import SamplingParams, Scope, ScopeKind
from tests.support.moving_replicas import Journey, MovingReplica, link_to, nothing_held, order_of
from tests.support.stamp_engine import Temper

ROOT = Path(__file__).parents[2]
AT_ONCE = 48
OUTPUT = 160
TEXTS = 24
LINK_BYTES_S = 40e6
BLOCK_BYTES = 1 << 18
BLOCKS = 1024
FORMAT = BlockFormat("1", "m", "r", "kv", BLOCK_BYTES)


def replica(folder: Path, stamps: bool) -> MovingReplica:
    if stamps:
        spec = ModelSpec(name="stamps", folder=str(folder), handover_bytes=64 << 20)
        temper = msgspec.json.encode(Temper(step_ms=1.0)).decode()
        return MovingReplica([sys.executable, str(ROOT / "tests/support/stamp_engine.py")], folder, spec, temper)
    spec = ModelSpec(
        name="ember", folder=str(files("engine") / "builtin_model"), dtype="float32", context_tokens=1024,
        kv_bytes=256 << 20, handover_bytes=256 << 20,
    )  # fmt: skip
    return MovingReplica([sys.executable, "-m", "engine.replica.server"], folder, spec)


def orders(rng: random.Random) -> list[Submit]:
    """Prompts of unlike lengths, greedy and drawn, each of them a text of its own."""
    prompts = [[rng.randrange(5, 900) for _ in range(rng.randrange(20, 200))] for _ in range(TEXTS)]
    return [
        order_of(prompt, OUTPUT, Scope(), SamplingParams(temperature=number % 2, seed=number, ignore_eos=True))
        for number, prompt in enumerate(prompts)
    ]


def moves(count: int, seed: int, stamps: bool) -> None:
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        pair = replica(Path(folder) / "a", stamps), replica(Path(folder) / "b", stamps)
        try:
            with link_to(pair[0], LINK_BYTES_S) as one, link_to(pair[1], LINK_BYTES_S) as other:
                links = {pair[0]: one.address, pair[1]: other.address}
                run_moves(count, seed, rng, pair, "stamps" if stamps else "built-in model", links)
        finally:
            for each in pair:
                each.stop()


def run_moves(
    count: int, seed: int, rng: random.Random, pair: tuple[MovingReplica, MovingReplica], model: str,
    links: dict[MovingReplica, str],
) -> None:  # fmt: skip
    texts = orders(rng)
    unmoved = [Journey(order, pair[0]) for order in texts]
    for journey in unmoved:
        journey.begin()
    expected = [journey.finish() for journey in unmoved]
    under_way: list[tuple[int, Journey]] = []
    done = wrong = failed = begun = 0
    began_s = time.monotonic()
    while done < count or under_way:
        while done < count and len(under_way) < AT_ONCE:
            begun += 1
            text = rng.randrange(TEXTS)
            scope = Scope(ScopeKind.TENANT, rng.randbytes(16)) if rng.random() < 0.5 else Scope()
            fields = {name: getattr(texts[text], name) for name in texts[text].__struct_fields__}
            journey = Journey(Submit(**fields | {"scope": scope}), rng.choice(pair))
            journey.begin()
            under_way.append((text, journey))
        asked = [
            (text, journey, pair[journey.at is pair[0]])
            for text, journey in under_way
            if not journey.at.peer.ended(journey.id) and done < count
        ]
        for _, journey, target in asked:
            journey.ask(target, links[target] if rng.random() < 0.5 else None)
        for _, journey, target in asked:
            journey.settle()
            if journey.moved():
                journey.follow(target)
                done += 1
            else:
                failed += journey.at.peer.failed.pop(journey.id, None) is not None
        for text, journey in [each for each in under_way if each[1].at.peer.ended(each[1].id) or done >= count]:
            wrong += journey.finish() != expected[text]
            under_way.remove((text, journey))
    took_s = time.monotonic() - began_s
    nothing_held(*pair)  # raises where a block or a lease is left
    shape = f"{model}, two CPU replicas, half over a link of {LINK_BYTES_S / 1e6:.0f} MB/s, seed {seed}"
    record("handovers", f"kv-moves-wrong, {done} moves of {begun} sequences, {shape}", wrong, "sequences", bound=0)
    blocks = sum(each.peer.counted("handover_claimed_blocks") for each in pair)
    record("handovers", f"handovers that failed, {shape}", failed, "handovers")
    record("handovers", f"blocks that went along, {shape}", blocks, "blocks")
    record("handovers", f"moves, {shape}", done / took_s, "moves/s")
    assert not wrong


def in_child(work: Callable[[], object]) -> int:
    """The id of a process that does this until it is killed."""
    pid = os.fork()
    if not pid:
        work()
        os._exit(0)
    return pid


def drain(listener: socket.socket, total: int) -> None:
    """Receives what each connection sends into memory that is there already, and says when it has all."""
    into = memoryview(bytearray(b"x" * total))
    while True:
        peer, _ = listener.accept()
        at = 0
        with peer:
            while received := peer.recv_into(into[at : at + BLOCK_BYTES]):
                at += received
            peer.send(b"e")


def take_in(listener: socket.socket, total: int, fabric: str = "") -> None:
    """Receives handovers, and lets each go a moment after it is whole."""
    area, sealed = StagingArea(2 * total, time.monotonic, shares_memory=False), threading.Event()
    endpoints = FabricEndpoints(fabric) if fabric else None
    _receiver = HandoverReceiver(listener, area, FORMAT, on_sealed=sealed.set, fabric=endpoints)
    while sealed.wait():
        time.sleep(0.1)
        sealed.clear()
        for staged in list(area._held.values()):
            staged.release()


def socket_bytes_s(address: tuple[str, int], total: int) -> float:
    """What a loopback TCP socket carries to another process, sent in pieces of a megabyte."""
    piece = memoryview(secrets.token_bytes(1 << 20))
    with socket.create_connection(address) as peer:
        began_s = time.monotonic()
        for _ in range(total >> 20):
            peer.sendall(piece)
        peer.shutdown(socket.SHUT_WR)
        peer.recv(1)
        return total / (time.monotonic() - began_s)


def handover_bytes_s(address: tuple[str, int], total: int, endpoints: FabricEndpoints | None = None) -> float:
    """What a handover carries over the same kind of socket, or by these endpoints, from memory of the sender's to
    memory of the receiver's that earlier ones had, checksums on both sides and the seal included."""
    wake = threading.Event()
    plan = HandoverPlan(f"tcp:{address[0]}:{address[1]}", "1", secrets.token_bytes(32), total // BLOCK_BYTES)
    source = memoryview(secrets.token_bytes(1 << 20))
    began_s = time.monotonic()
    sender = OutgoingHandover(plan, FORMAT, dial, wake.set, fabric=endpoints)
    while sender.pushed < plan.blocks and not sender.ended:
        piece = sender.piece(sender.max_run)
        if piece is None:
            wake.wait(1.0)
            wake.clear()
            continue
        assert isinstance(piece, HostPiece)
        piece.view[:] = source
        sender.push([b"n" * 32] * sender.max_run, piece)
    sender.seal()
    while not sender.ended:
        wake.wait(1.0)
        wake.clear()
    took_s = time.monotonic() - began_s
    assert (sender.state, sender.whole) == (HandoverState.SEALED, plan.blocks), sender.problem
    assert sender.over_fabric == (0 if endpoints is None else plan.blocks)
    time.sleep(0.3)  # until it is let go
    return total / took_s


def beside_socket(way: str, fabric: str = "", rounds: int = 9) -> None:
    """Handovers and what the socket carries, one after the other, each to a process of its own."""
    total = BLOCK_BYTES * BLOCKS
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    works = partial(take_in, listeners[0], total, fabric), partial(drain, listeners[1], total)
    children = [in_child(work) for work in works]
    try:
        there, bare_there = (listener.getsockname() for listener in listeners)
        endpoints = FabricEndpoints(fabric) if fabric else None
        handover_bytes_s(there, total, endpoints)
        socket_bytes_s(bare_there, total)
        pairs = [(handover_bytes_s(there, total, endpoints), socket_bytes_s(bare_there, total)) for _ in range(rounds)]
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    own, bare = (statistics.median(column) for column in zip(*pairs, strict=True))
    ratio = statistics.median(one / other for one, other in pairs)
    over = f"UCX over {os.environ.get('UCX_TLS', 'all')}" if fabric else "loopback TCP"
    shape = f"{over} to another process, {total >> 20} MiB in blocks of {BLOCK_BYTES >> 10} KiB, median of {rounds}"
    record("handovers", f"kv-handover-{way}, {shape}", ratio, "of the socket's own", bound=1.0)
    record("handovers", f"handover, {shape}", own / 1e9, "GB/s", peer=f"the socket {bare / 1e9:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--part", choices=["moves", "tcp", "nixl", "probe", "gpu", "pd"], required=True)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: the built-in model, small")
    parser.add_argument("--kept", type=Path, help="a folder for compiled kernels, which the next part finds")
    parser.add_argument("--moves", type=int, default=10_000)
    parser.add_argument("--stamps", action="store_true", help="a model that checks every slot it reads")
    parser.add_argument("--seed", type=int, default=21)
    arguments = parser.parse_args()
    if arguments.part == "moves":
        moves(arguments.moves, arguments.seed, arguments.stamps)
    elif arguments.part == "tcp":
        beside_socket("tcp")
    elif arguments.part == "nixl":
        beside_socket("nixl", "benchmark")
    elif arguments.part == "probe":
        probe(arguments.device)
    elif arguments.part == "gpu":
        one_prompt(arguments.device, arguments.kept)
    else:
        apart(arguments.device, arguments.kept)


if __name__ == "__main__":
    main()
