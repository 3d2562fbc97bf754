"""A replica of a small model that is placed somewhere else a hundred times a second, by a machine that sees to it over
a real socket, while gateways' requests run: each ends with the tokens that it gets where nothing moves."""

import gc
import random
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from engine.execution.open import inference_mode, open_model
from engine.process.heartbeat import Heartbeat
from engine.protocol.connection import listen
from engine.protocol.specs import ReplicaSpec
from engine.protocol.types import FinishReason, Residency, SamplingParams, SchedulingTerms, Scope
from engine.replica.replica import Replica, ReplicaLimits
from engine.structured_output.manager import StructuredOutputManager
from tests.engine.replica.test_server import TENANT_A, TENANT_B, Peer, finished
from tests.support.small_models import reference_model, saved, spec

pytestmark = pytest.mark.usefixtures("inference")

REQUESTS = 30
PUBLIC = list(range(2, 34))


class Served:
    """A replica in a thread, so that what it holds can be looked at when it has ended."""

    def __init__(self, folder: Path, grammars: StructuredOutputManager) -> None:
        address = f"unix:{folder / 'r'}"
        model = spec(saved(reference_model("qwen3"), folder), context_tokens=256, kv_bytes=4 << 20, sequences=8,
                     public_prefixes=[PUBLIC])  # fmt: skip
        self.runner = open_model(model, "cpu", 1, lambda: None)
        told = ReplicaSpec(model=model, address=address, pulse=str(folder / "pulse"), boot=1)
        self.replica = Replica(
            told, self.runner, grammars, Heartbeat.create(told.pulse), listen(address), ReplicaLimits(), lambda: False,
            time.monotonic,
        )  # fmt: skip
        self.address = address
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with inference_mode():  # a thread has its own
            self.replica.run()

    def end(self) -> None:
        """It may sleep, and ends anyway; then all its blocks are accounted for."""
        self.replica.drain()
        self._thread.join(10)
        assert not self._thread.is_alive()
        self.replica._scheduler.check()
        self.runner.paged.pool.check()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with closing(StructuredOutputManager(tmp_path, 1)) as grammars:
        replica = Served(tmp_path, grammars)
        gc.freeze()  # as a replica's process
        yield replica
        gc.unfreeze()
        replica.end()


def submit(peer: Peer, id: int) -> None:
    """The same for an id each time: prompts that share prefixes, some published, some secret, greedy and not."""
    rng = random.Random(id)
    scope = (TENANT_A, TENANT_B, Scope())[id % 3]
    prefix = PUBLIC if id % 4 == 0 else [(7 * scope.id[0] if scope.id else 5) % 150 + 2] * 40
    tokens = prefix + [rng.randrange(2, 160) for _ in range(rng.randrange(1, 60))]
    sampling = SamplingParams(temperature=rng.choice([0.0, 1.0]), seed=id)
    peer.submit(
        id,
        tokens,
        rng.randrange(1, 40),
        scope=scope,
        sampling=sampling,
        terms=SchedulingTerms(erase=id % 5 == 0),
        stop_ids=[],
    )


def answers(served: Served, rng: random.Random | None = None) -> dict[int, list[int]]:
    """Of all requests; with `rng` a machine places the replica at random as they are sent, and then on its device."""
    gateway, machine = Peer(served.address), Peer(served.address)
    sizes = served.runner.sleeper.usage()
    ids = range(1, REQUESTS + 1)
    for id in ids:
        submit(gateway, id)
        for _ in range(0 if rng is None else 5):
            assert rng is not None
            residency = rng.choice([Residency.MEMORY, Residency.DEVICE])
            size = rng.choice([None, rng.randrange(sizes.max_bytes)])
            machine.place(residency, size, rng.choice([0, 0, 20]))
            gateway.read(0.01)
    machine.place(Residency.DEVICE)
    gateway.until(finished(*ids), limit_s=30)
    machine.until(lambda peer: bool(peer.placed) and peer.placed[-1].residency == Residency.DEVICE)
    assert {finish.reason for finish in gateway.finished.values()} <= {FinishReason.LENGTH, FinishReason.STOP}
    if rng is not None:
        there = [placed.residency for placed in machine.placed]
        assert min(there.count(Residency.MEMORY), there.count(Residency.DEVICE)) > 5, "a storm"
        assert not any(placed.problem for placed in machine.placed)
    return gateway.tokens


def test_a_storm_of_places_changes_no_token(served: Served) -> None:
    calm = answers(served)
    for seed in (1, 2):
        assert answers(served, random.Random(seed)) == calm
