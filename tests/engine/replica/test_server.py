"""engine/replica/server.py as a real process over real unix sockets, with the stamp engine for a model."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from engine.process.heartbeat import Heartbeat, ReplicaPhase
from engine.protocol.cache_frames import HeldPrefixes, RaiseEpochs, RouteKey
from engine.protocol.frames import (
    PROTOCOL_OLDEST,
    PROTOCOL_VERSION,
    Cancel,
    Frame,
    FrameReader,
    Hello,
    PlacementStatus,
    PollLoad,
    Reject,
    ReplicaLoad,
    SequenceFinished,
    SequenceStarted,
    SetPlacement,
    StepOutputs,
    Submit,
    encode_frame,
)
from engine.protocol.prefix_names import prefix_names
from engine.protocol.specs import ModelSpec, ReplicaSpec
from engine.protocol.types import (
    FinishReason,
    GivenTokens,
    PrefixTier,
    RejectReason,
    Residency,
    SamplingParams,
    SchedulingTerms,
    Scope,
    ScopeKind,
)
from tests.support.stamp_engine import Temper, solo
from tests.support.waiting import wait_for

STAMP = Path(__file__).parents[2] / "support" / "stamp_engine.py"
TENANT_A = Scope(ScopeKind.TENANT, b"a" * 16)
TENANT_B = Scope(ScopeKind.TENANT, b"b" * 16)
PROMPT = list(range(1, 42))
LIMIT_S = 30.0


class Peer:
    """A gateway as the replica sees it: sends frames, and sorts what comes back by sequence."""

    def __init__(self, address: str, patience_s: float = LIMIT_S) -> None:
        self.socket = connected(address, patience_s)
        self._reader = FrameReader()
        self.frames: list[Frame] = []
        self.tokens: dict[int, list[int]] = {}
        self.started: dict[int, SequenceStarted] = {}
        self.finished: dict[int, SequenceFinished] = {}
        self.rejected: dict[int, Reject] = {}
        self.placed: list[PlacementStatus] = []
        self.loads = [ReplicaLoad(-1, -1, -1, -1, -1, -1)]
        self.closed = False

    @property
    def load(self) -> ReplicaLoad:
        """The last one; of −1 before the first."""
        return self.loads[-1]

    def submit(self, id: int, tokens: Sequence[int] = PROMPT, max_tokens: int = 5, **fields: object) -> None:
        plain = Submit(id, array("I", tokens).tobytes(), TENANT_A, SamplingParams(), max_tokens)
        self.socket.sendall(encode_frame(msgspec.structs.replace(plain, **fields)))

    def cancel(self, *ids: int) -> None:
        self.socket.sendall(encode_frame(Cancel(list(ids))))

    def place(self, residency: Residency, device_bytes: int | None = None, drain_ms: int = 0) -> None:
        self.socket.sendall(encode_frame(SetPlacement(residency, device_bytes, drain_ms)))

    def until(self, done: Callable[["Peer"], bool], limit_s: float = LIMIT_S) -> "Peer":
        """Reads until it is done; fails after the limit."""
        deadline = time.monotonic() + limit_s
        while not done(self):
            left = deadline - time.monotonic()
            assert left > 0, f"not in {limit_s} s; last frames: {self.frames[-3:]}"
            self.read(left)
        return self

    def read(self, limit_s: float) -> None:
        self.socket.settimeout(max(limit_s, 0.001))
        try:
            received = self.socket.recv(1 << 16)
        except TimeoutError:
            return
        except ConnectionError:
            received = b""
        if not received:
            assert not self.closed, "waiting for frames on a closed connection"
            self.closed = True
        for frame in self._reader.feed(received):
            self._take(frame)

    def _take(self, frame: Frame) -> None:
        self.frames.append(frame)
        if isinstance(frame, StepOutputs):
            self._progress(frame)
        elif isinstance(frame, Reject):
            self.rejected[frame.id] = frame
        elif isinstance(frame, PlacementStatus):
            self.placed.append(frame)
        elif isinstance(frame, ReplicaLoad):
            self.loads.append(frame)

    def _progress(self, frame: StepOutputs) -> None:
        tokens, at = array("I", frame.tokens), 0
        for started in frame.started:
            self.started[started.id] = started
        for id, count in zip(frame.ids, frame.counts, strict=True):
            self.tokens.setdefault(id, []).extend(tokens[at : at + count])
            at += count
        for finish in frame.finished:
            self.finished[finish.id] = finish


def connected(address: str, patience_s: float) -> socket.socket:
    def connect() -> socket.socket | None:
        peer = socket.socket(socket.AF_UNIX)
        try:
            peer.connect(address.removeprefix("unix:"))
        except OSError:
            peer.close()
            return None
        return peer

    peer: socket.socket = wait_for(connect, patience_s, f"{address} takes connections")
    return peer


class Stamped:
    """A replica process with the stamp engine."""

    def __init__(self, folder: Path, temper: Temper | None = None, **model: object) -> None:
        self.address = f"unix:{folder / 'r'}"
        self.pulse = str(folder / "pulse")
        self.log = folder / "log"
        self.spec = ReplicaSpec(
            model=ModelSpec(name="@cf/test/stamp", folder=str(folder), **model),  # type: ignore[arg-type]
            address=self.address,
            pulse=self.pulse,
            boot=7,
            region="eu",
        )
        with self.log.open("w") as log:
            self.process = subprocess.Popen(self.command(temper or Temper()), stderr=log)

    def command(self, temper: Temper) -> list[str]:
        return [
            sys.executable,
            str(STAMP),
            msgspec.json.encode(self.spec).decode(),
            msgspec.json.encode(temper).decode(),
        ]

    def peer(self) -> Peer:
        return Peer(self.address)

    def status(self) -> int:
        """The exit status, once it has ended."""
        return self.process.wait(LIMIT_S)

    def events(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(LIMIT_S)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Stamped]]:
    """Starts a stamp replica; all are gone after the test."""
    replicas: list[Stamped] = []

    def start_one(temper: Temper | None = None, **model: object) -> Stamped:
        replicas.append(Stamped(tmp_path, temper, **model))
        return replicas[-1]

    yield start_one
    for replica in replicas:
        replica.stop()


@pytest.fixture(scope="module", params=[1, 2], ids=["depth 1", "depth 2"])
def calm(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Stamped]:
    """One replica for the tests that leave it as it was."""
    replica = Stamped(tmp_path_factory.mktemp("calm"), Temper(depth=request.param))
    yield replica
    replica.stop()


def finished(*ids: int) -> Callable[[Peer], bool]:
    return lambda peer: all(id in peer.finished or id in peer.rejected for id in ids)


def expected(tokens: Sequence[int] = PROMPT, max_tokens: int = 5, sampling: SamplingParams | None = None) -> list[int]:
    return solo(tokens, sampling or SamplingParams(), len(tokens) + max_tokens, [], Temper().vocabulary)[0]


# What a gateway gets


def test_what_is_left_to_prepare_is_done_while_nothing_is_to_be_computed(start: Callable[..., Stamped]) -> None:
    replica = start(Temper(preparations=300, step_ms=1.0))
    peer = replica.peer()
    peer.submit(1)
    peer.until(finished(1))
    assert peer.tokens[1] == expected()
    prepared = wait_for(lambda: [event for event in replica.events() if event["event"] == "prepared"])
    assert prepared[0]["times"] == 300


def test_hello_is_first_and_says_what_the_model_takes(calm: Stamped) -> None:
    peer = calm.peer().until(lambda peer: len(peer.frames) >= 2)
    hello = peer.frames[0]
    assert isinstance(hello, Hello)
    assert (hello.protocol, hello.model, hello.revision, hello.boot) == (
        PROTOCOL_OLDEST,
        "@cf/test/stamp",
        "stamp-1",
        "7",
    )
    assert hello.newest_protocol == PROTOCOL_VERSION
    assert (hello.pid, hello.vocabulary, hello.context_tokens) == (calm.process.pid, 1000, 4096)
    assert (hello.block_tokens, hello.blocks) == (16, 1024)
    assert isinstance(peer.frames[1], ReplicaLoad)


def test_a_request_for_other_regions_alone_is_refused_by_the_replica_itself(calm: Stamped) -> None:
    peer = calm.peer()
    peer.submit(1, regions=["us", "eu-2"])
    peer.submit(2, regions=["us", "eu"])
    peer.until(finished(1, 2))
    assert peer.rejected[1].reason is RejectReason.REGION
    assert "in eu, and the request is for us, eu-2 alone" in peer.rejected[1].message
    assert peer.tokens == {2: expected()}
    hello = peer.frames[0]
    assert isinstance(hello, Hello)
    assert hello.region == "eu"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_request_that_began_elsewhere_goes_on_behind_the_tokens_given(calm: Stamped, temperature: float) -> None:
    peer, seeded = calm.peer(), SamplingParams(temperature=temperature, seed=5)
    whole = {choice: expected(PROMPT, 12, msgspec.structs.replace(seeded, seed=5 + choice)) for choice in (0, 2)}
    given = [GivenTokens(choice, array("I", tokens[: 4 * choice]).tobytes()) for choice, tokens in whole.items()]
    peer.submit(10, max_tokens=12, sampling=seeded, n=2, given=given)
    peer.until(finished(10, 11))
    assert peer.tokens == {10: whole[0], 11: whole[2][8:]}
    assert [peer.finished[id].completion_tokens for id in (10, 11)] == [12, 12]
    assert all(peer.started[id].cached_tokens <= len(PROMPT) for id in (10, 11)), "of the prompt alone"


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ([GivenTokens(0, b"\1\0\0\0" * 5)], "choice 0 has ended"),
        ([GivenTokens(0, b"\7\0\0\0")], "choice 0 has ended"),
        ([GivenTokens(0, b"\0\0\1\0")], "vocabulary"),
        ([GivenTokens(0, b"abc")], "packed u32"),
        ([GivenTokens(-1, b"")], "packed u32"),
        ([GivenTokens(0, b""), GivenTokens(1, b"")], "each of the n choices"),
    ],
    ids=["whole", "stopped", "unknown", "cut", "choice", "more"],
)
def test_tokens_given_that_no_replica_can_have_emitted_are_refused(
    calm: Stamped, given: list[GivenTokens], problem: str
) -> None:
    peer = calm.peer()
    peer.submit(20, stop_ids=[7], given=given)
    peer.until(finished(20))
    assert peer.rejected[20].reason is RejectReason.INVALID
    assert problem in peer.rejected[20].message


def test_a_prompt_is_answered_token_by_token_and_ends_once(calm: Stamped) -> None:
    peer = calm.peer()
    peer.submit(3, [5, 6, 7], max_tokens=4)
    peer.until(finished(3))
    assert peer.tokens == {3: expected([5, 6, 7], 4)}
    assert peer.finished[3] == SequenceFinished(3, FinishReason.LENGTH, 4)
    assert peer.started[3].cached_tokens == 0
    assert peer.started[3].waited_ms >= 0


def test_all_sequences_of_a_step_travel_in_one_progress(calm: Stamped) -> None:
    peer = calm.peer()
    peer.socket.sendall(
        b"".join(encode_frame(Submit(id, array("I", [id]).tobytes(), Scope(), SamplingParams(), 6)) for id in (1, 2))
    )
    peer.until(finished(1, 2))
    together = [frame for frame in peer.frames if isinstance(frame, StepOutputs) and frame.ids == [1, 2]]
    assert len(together) >= 5


def test_cached_prefix_is_exact_for_the_same_scope_and_zero_for_another(calm: Stamped) -> None:
    prompt = list(range(500, 570))  # 70 tokens: 4 whole blocks of 16, and a rest
    peer = calm.peer()
    for id, scope in ((1, TENANT_A), (2, TENANT_A), (3, TENANT_B), (4, Scope()), (5, TENANT_A)):
        peer.submit(id, prompt, scope=scope)
        peer.until(finished(id))
    assert [peer.started[id].cached_tokens for id in (1, 2, 3, 4, 5)] == [0, 64, 0, 0, 64]
    assert all(peer.tokens[id] == expected(prompt) for id in (1, 2, 3, 4, 5))


def test_a_scope_keeps_no_more_unused_blocks_than_its_cap(start: Callable[..., Stamped]) -> None:
    prompt = list(range(500, 570))
    peer = start(scope_cap_blocks=2).peer()
    for id in (1, 2):
        peer.submit(id, prompt, scope=TENANT_A)
        peer.until(finished(id))
    assert [peer.started[id].cached_tokens for id in (1, 2)] == [0, 32]


def test_what_is_published_is_cached_before_the_first_request_and_for_everybody(start: Callable[..., Stamped]) -> None:
    prompt = list(range(500, 570))
    peer = start(Temper(depth=2), public_prefixes=[prompt[:40]]).peer()
    for id, scope in ((1, TENANT_A), (2, TENANT_B), (3, Scope()), (4, TENANT_A)):
        peer.submit(id, prompt, scope=scope)
        peer.until(finished(id))
    assert [peer.started[id].cached_tokens for id in (1, 2, 3, 4)] == [32, 32, 32, 64]
    assert all(peer.tokens[id] == expected(prompt) for id in (1, 2, 3, 4))


def test_a_prefix_that_cannot_be_published_ends_the_start_with_what_to_change(start: Callable[..., Stamped]) -> None:
    replica = start(public_prefixes=[[1, 2, 3]])
    assert replica.status() != 0
    assert "public_prefixes[0] has 3 tokens" in replica.log.read_text()


def test_a_model_that_cannot_be_opened_is_told_in_one_line_and_no_traceback(tmp_path: Path) -> None:
    spec = ReplicaSpec(
        model=ModelSpec(name="@cf/test/gone", folder=str(tmp_path / "gone")),
        address=f"unix:{tmp_path / 'replica.sock'}",
        pulse=str(tmp_path / "pulse"),
        boot=1,
        device="cpu",
    )
    words = [sys.executable, "-m", "engine.replica.server", msgspec.json.encode(spec).decode()]
    ended = subprocess.run(words, capture_output=True, text=True)
    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr
    assert ended.stderr.splitlines()[-1].startswith(f"{tmp_path / 'gone' / 'config.json'} is missing: a model folder")


def test_what_is_over_is_given_back_while_nothing_runs(start: Callable[..., Stamped]) -> None:
    peer = start(Temper(blocks=4000)).peer()
    peer.submit(1, list(range(500, 570)), terms=SchedulingTerms(keep_s=0.6))
    peer.until(finished(1))
    peer.until(lambda peer: any(load.cached_blocks == 4 for load in peer.loads))
    peer.until(lambda peer: peer.load.cached_blocks == 0)
    assert peer.load.counters["evicted_age_blocks"] == peer.load.counters["erased_blocks"] == 4


def test_raised_epochs_wipe_what_is_cached_without_a_call_and_a_late_one_finds_nothing(
    start: Callable[..., Stamped],
) -> None:
    prompt, own = list(range(500, 570)), Scope(ScopeKind.USER, b"u" * 16, account=b"c" * 16)
    peer = start(Temper(blocks=4000)).peer()
    for id, scope in ((1, TENANT_A), (2, TENANT_B), (3, own)):
        peer.submit(id, prompt, scope=scope)
        peer.until(finished(id))
    peer.until(lambda peer: peer.load.cached_blocks == 12)
    peer.socket.sendall(encode_frame(RaiseEpochs([b"a" * 16, b"c" * 16, b"x" * 16], [1, 2, 3])))
    peer.until(lambda peer: peer.load.cached_blocks == 4)
    assert peer.load.counters["evicted_epoch_blocks"] == peer.load.counters["erased_blocks"] == 8
    for id, scope in ((4, TENANT_A), (5, TENANT_B), (6, own), (7, TENANT_A)):
        peer.submit(id, prompt, scope=scope)
        peer.until(finished(id))
    assert [peer.started[id].cached_tokens for id in (4, 5, 6, 7)] == [0, 64, 0, 0], (
        "a late caller's is kept for nobody"
    )
    for id in (8, 9):
        peer.submit(id, prompt, scope=msgspec.structs.replace(TENANT_A, epoch=1))
        peer.until(finished(id))
    assert [peer.started[id].cached_tokens for id in (8, 9)] == [0, 64]


def test_whoever_brings_a_key_is_told_what_is_cached_and_what_changes(start: Callable[..., Stamped]) -> None:
    key, prompt = b"k" * 32, list(range(500, 640))
    replica = start(Temper(blocks=4000))
    peer, later = replica.peer(), replica.peer()
    names = b"".join(name for _, name in prefix_names(key, (2, b"a" * 16, 0), array("I", prompt).tobytes()))
    held = HeldPrefixes(names, bytes([PrefixTier.DEVICE] * 2))
    peer.socket.sendall(encode_frame(RouteKey(key)))
    peer.submit(1, prompt)
    peer.until(finished(1))
    peer.until(lambda peer: held in peer.frames)
    later.socket.sendall(encode_frame(RouteKey(key)))
    later.until(lambda peer: held in peer.frames)
    peer.socket.sendall(encode_frame(RaiseEpochs([b"a" * 16], [1])))
    for each in (peer, later):
        each.until(lambda peer: HeldPrefixes(names, bytes([PrefixTier.NONE] * 2)) in peer.frames)


def test_choices_are_sampled_with_seeds_that_count_up(calm: Stamped) -> None:
    peer = calm.peer()
    sampling = SamplingParams(temperature=1.0, seed=11)
    peer.submit(10, n=3, sampling=sampling)
    peer.until(finished(10, 11, 12))
    for choice in range(3):
        assert peer.tokens[10 + choice] == expected(sampling=SamplingParams(temperature=1.0, seed=11 + choice))


def test_logprobs_come_one_per_token_of_those_who_asked(calm: Stamped) -> None:
    peer = calm.peer()
    peer.submit(1, sampling=SamplingParams(logprobs=2))
    peer.submit(2)
    peer.until(finished(1, 2))
    told = [item for frame in peer.frames if isinstance(frame, StepOutputs) for item in frame.logprobs]
    assert [item.id for item in told] == [1] * len(peer.tokens[1])
    assert all(len(item.top_ids) == 2 for item in told)


def test_stop_token_is_reported_and_ends_the_sequence(calm: Stamped) -> None:
    third = expected()[2]
    peer = calm.peer()
    peer.submit(1, stop_ids=[third])
    peer.until(finished(1))
    assert peer.tokens[1] == expected()[: expected().index(third) + 1]
    assert peer.finished[1].reason == FinishReason.STOP


def test_the_same_ids_on_two_connections_are_different_sequences(calm: Stamped) -> None:
    one, two = calm.peer(), calm.peer()
    one.submit(1, [1, 2, 3])
    two.submit(1, [4, 5, 6])
    assert one.until(finished(1)).tokens == {1: expected([1, 2, 3])}
    assert two.until(finished(1)).tokens == {1: expected([4, 5, 6])}


def test_load_comes_twice_a_second_and_when_a_sequence_starts_or_ends(calm: Stamped) -> None:
    peer = calm.peer().until(lambda peer: len(peer.loads) >= 2)
    began = time.monotonic()
    peer.until(lambda peer: len(peer.loads) >= 5)
    assert 0.9 < time.monotonic() - began < 15.0
    seen = len(peer.loads)
    peer.submit(1, max_tokens=3)
    peer.until(lambda peer: any(load.running == 1 for load in peer.loads[seen:]) and peer.load.running == 0)
    first, last = peer.loads[1], peer.load
    assert all(last.counters[name] >= count for name, count in first.counters.items())
    assert last.free_blocks + last.cached_blocks == 1024


def test_a_gateway_hears_of_anothers_sequences_with_the_next_load_and_not_at_each(calm: Stamped) -> None:
    busy, watcher = calm.peer(), calm.peer().until(lambda peer: len(peer.loads) >= 2)
    seen, before = len(watcher.loads), len(busy.loads)
    for id in range(30):
        busy.submit(id, [id + 1], max_tokens=2)
        busy.until(finished(id))
    started = busy.load.counters["started"]
    watcher.until(lambda peer: peer.load.counters.get("started", 0) >= started)
    assert len(busy.loads) - before >= 30
    assert len(watcher.loads) - seen < 30


def loads_behind(peer: Peer, id: int) -> list[ReplicaLoad]:
    """The loads that came behind the refusal of a sequence, as far as the next refusal."""
    places = [place for place, frame in enumerate(peer.frames) if isinstance(frame, Reject)]
    first = next(place for place in places if peer.frames[place] is peer.rejected[id])
    end = next((place for place in places if place > first), None)
    return [frame for frame in peer.frames[first:end] if isinstance(frame, ReplicaLoad)]


def test_a_gateway_that_polls_hears_what_is_news_to_it_and_nothing_twice(calm: Stamped) -> None:
    quiet, watcher = calm.peer(), calm.peer()
    quiet.socket.sendall(encode_frame(PollLoad()))
    quiet.submit(1, regions=["us"])
    quiet.until(finished(1))
    ticks = len(watcher.loads) + 5
    watcher.until(lambda peer: len(peer.loads) >= ticks)
    quiet.submit(2, regions=["us"])
    quiet.until(finished(2))
    heard = loads_behind(quiet, 1)
    assert heard, "it had counted on a sequence that never was"
    assert all(one != other for one, other in pairwise(heard))
    quiet.until(lambda peer: bool(loads_behind(peer, 2)))
    watcher.submit(1, max_tokens=3)
    watcher.until(finished(1))
    quiet.until(lambda peer: peer.load.counters.get("started") == watcher.load.counters["started"])


# What a gateway may do wrong


def test_frames_may_arrive_in_pieces(calm: Stamped) -> None:
    peer = calm.peer()
    frame = encode_frame(Submit(1, array("I", [1, 2]).tobytes(), Scope(), SamplingParams(), 2))
    for byte in frame[:-1]:
        peer.socket.send(bytes([byte]))
    time.sleep(0.05)
    assert 1 not in peer.tokens
    peer.socket.send(frame[-1:])
    assert peer.until(finished(1)).tokens == {1: expected([1, 2], 2)}


@pytest.mark.parametrize(
    "rubbish",
    [
        b"\xff\xff\xff\xff",  # a frame of 4 GiB
        b"\x00\x00\x00\x03abc",  # no msgpack
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 10,
        encode_frame(ReplicaLoad(1, 2, 3, 4, 5, 6)),  # a frame, but not for a replica
        b"\x00\x00\x00\x00",
        b"\x00\x00\x00\x09\x92\xa6\xff\xff\xff\xff\xff\xff\x90",  # text that is none
        b"\x00\x0f\x42\x4a\x93\xa6cancel\x90" + b"\x91" * 1_000_000 + b"\xc0",  # nested without a bottom
    ],
    ids=["length", "body", "http", "load", "empty", "text", "nested"],
)
def test_rubbish_closes_its_own_connection_only(calm: Stamped, rubbish: bytes) -> None:
    innocent, guilty = calm.peer(), calm.peer()
    innocent.submit(1, max_tokens=50)
    guilty.submit(1, max_tokens=3000)
    guilty.socket.sendall(rubbish)
    guilty.until(lambda peer: peer.closed)
    innocent.until(finished(1))
    assert innocent.finished[1].reason == FinishReason.LENGTH
    innocent.until(lambda peer: peer.load.running == 0)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"tokens": [1000]}, RejectReason.INVALID),
        ({"tokens": []}, RejectReason.INVALID),
        ({"n": 129}, RejectReason.INVALID),
        ({"sampling": SamplingParams(temperature=-1)}, RejectReason.INVALID),
        ({"tokens": [1] * 4096}, RejectReason.TOO_LONG),
    ],
)
def test_submit_that_cannot_run_is_rejected_and_the_connection_lives(
    calm: Stamped, fields: dict[str, object], reason: RejectReason
) -> None:
    peer = calm.peer()
    peer.submit(1, **fields)  # type: ignore[arg-type]
    peer.until(finished(1))
    assert peer.rejected[1].reason == reason
    assert peer.rejected[1].message
    peer.submit(1, [1])
    assert peer.until(lambda peer: 1 in peer.finished).tokens[1] == expected([1])


def test_an_id_in_use_is_rejected(start: Callable[..., Stamped]) -> None:
    peer = start(Temper(step_ms=5)).peer()
    peer.submit(1, max_tokens=2000)
    peer.submit(1)
    peer.until(finished(1))
    assert peer.rejected[1].reason == RejectReason.INVALID


def test_cancel_of_unknown_ids_is_ignored(calm: Stamped) -> None:
    peer = calm.peer()
    peer.cancel(1, 2, 3)
    peer.submit(1)
    assert peer.until(finished(1)).finished[1].reason == FinishReason.LENGTH
    peer.cancel(1)
    peer.submit(2)
    assert peer.until(finished(2)).finished[2].reason == FinishReason.LENGTH


def test_full_queue_is_busy_and_says_when_to_come_back(start: Callable[..., Stamped]) -> None:
    peer = start(Temper(step_ms=2), sequences=1, waiting=2).peer()
    peer.submit(1, max_tokens=300)
    peer.until(lambda peer: 1 in peer.started)
    for id in range(2, 6):
        peer.submit(id, max_tokens=1)
    peer.until(finished(1, 2, 3, 4, 5))
    assert {id: reject.reason for id, reject in peer.rejected.items()} == dict.fromkeys((4, 5), RejectReason.BUSY)
    assert peer.rejected[4].retry_after_ms >= 250
    assert {finish.reason for finish in peer.finished.values()} == {FinishReason.LENGTH}


def test_who_has_less_in_a_full_queue_gets_a_place_in_it_and_the_other_is_told(start: Callable[..., Stamped]) -> None:
    peer = start(Temper(step_ms=2), sequences=1, waiting=4).peer()
    peer.submit(1, max_tokens=200)
    peer.until(lambda peer: 1 in peer.started)
    for id in range(2, 6):
        peer.submit(id, max_tokens=1)
    peer.submit(6, max_tokens=1, scope=TENANT_B)
    peer.until(lambda peer: 5 in peer.rejected)
    assert peer.rejected[5].reason == RejectReason.BUSY
    peer.until(finished(1, 2, 3, 4, 6))
    assert peer.rejected.keys() == {5}
    peer.until(lambda peer: peer.load.counters.get("displaced_requests") == 1)


@pytest.mark.parametrize("depth", [1, 2])
def test_what_waits_past_its_deadline_is_rejected_whole_when_it_is_over(
    start: Callable[..., Stamped], depth: int
) -> None:
    peer = start(Temper(step_ms=5, depth=depth), sequences=1).peer()
    peer.submit(1, max_tokens=3000)
    peer.until(lambda peer: 1 in peer.started)
    began = time.monotonic()
    peer.submit(2, n=2, deadline_ms=300)
    peer.submit(4, max_tokens=1, deadline_ms=60_000)
    peer.until(lambda peer: 2 in peer.rejected)
    assert time.monotonic() - began >= 0.3
    assert 1 not in peer.finished
    assert "waited" in peer.rejected[2].message
    peer.cancel(1)
    peer.until(finished(1, 4))
    assert peer.finished.keys() == {1, 4}


# How sequences end early


@pytest.mark.parametrize("depth", [1, 2])
def test_cancelled_sequence_ends_and_gives_back_its_blocks(start: Callable[..., Stamped], depth: int) -> None:
    peer = start(Temper(step_ms=2, depth=depth)).peer()
    peer.submit(1, max_tokens=3000)
    peer.submit(2, max_tokens=3000, scope=Scope())
    peer.until(lambda peer: len(peer.tokens.get(2, [])) > 3)
    peer.cancel(1, 2)
    peer.until(finished(1, 2))
    assert peer.finished[1].reason == FinishReason.CANCELLED
    assert peer.finished[1].completion_tokens == len(peer.tokens[1])
    peer.until(lambda peer: peer.load.running == 0)
    assert peer.load.free_blocks + peer.load.cached_blocks == 1024


def test_end_of_the_connection_cancels_its_sequences(start: Callable[..., Stamped]) -> None:
    replica = start(Temper(step_ms=2), sequences=2)
    watcher, leaver = replica.peer(), replica.peer()
    for id in range(5):  # two run, three wait
        leaver.submit(id, [id + 1], max_tokens=3000, scope=Scope())
    leaver.until(lambda peer: len(peer.tokens) == 2)
    watcher.until(lambda peer: peer.load.running == 2 and peer.load.waiting == 3)
    leaver.socket.close()
    watcher.until(lambda peer: (peer.load.running, peer.load.waiting) == (0, 0))
    assert watcher.load.free_blocks == 1024
    watcher.submit(1)
    assert watcher.until(finished(1)).tokens == {1: expected()}


def test_what_a_gateway_sent_before_it_was_gone_does_not_run(start: Callable[..., Stamped]) -> None:
    replica = start(Temper(step_ms=100))
    watcher, leaver = replica.peer(), replica.peer()
    leaver.until(lambda peer: len(peer.frames) >= 2)
    watcher.submit(1, max_tokens=3000)
    watcher.until(lambda peer: 1 in peer.tokens)
    refused = Submit(1, b"", TENANT_A, SamplingParams(), 5)  # the answer to it finds the connection closed
    orphan = Submit(2, array("I", PROMPT).tobytes(), TENANT_B, SamplingParams(), 3000)
    leaver.socket.sendall(encode_frame(refused) + encode_frame(orphan))  # while the replica computes
    leaver.socket.close()
    time.sleep(0.3)
    seen = len(watcher.loads)
    watcher.until(lambda peer: len(peer.loads) > seen + 1)
    assert (watcher.load.running, watcher.load.waiting) == (1, 0)


def test_a_gateway_that_does_not_read_is_dropped_and_never_waited_for(start: Callable[..., Stamped]) -> None:
    replica = start(Temper(unsent_bytes=1 << 15))
    reader, sleeper = replica.peer(), replica.peer()
    for id in range(8):
        sleeper.submit(id, [id + 1], max_tokens=4000, sampling=SamplingParams(logprobs=20))
    reader.until(lambda peer: peer.load.counters.get("finished_cancelled") == 8)
    assert reader.load.running == 0
    reader.submit(1)
    reader.until(finished(1))
    sleeper.until(lambda peer: peer.closed)
    assert any(event["event"] == "disconnected" and "unread" in str(event["reason"]) for event in replica.events())


def test_connections_are_limited(start: Callable[..., Stamped]) -> None:
    replica = start(Temper(connections=3))
    peers = [replica.peer().until(lambda peer: len(peer.frames) >= 2) for _ in range(3)]
    replica.peer().until(lambda peer: peer.closed)
    peers.pop().socket.close()

    def served() -> bool:
        peer = replica.peer().until(lambda peer: peer.closed or len(peer.frames) >= 2)
        return not peer.closed

    wait_for(served, what="the place of the one that left is free")


@pytest.mark.parametrize("depth", [1, 2])
def test_a_failed_step_ends_its_sequences_and_the_replica_lives(start: Callable[..., Stamped], depth: int) -> None:
    peer = start(Temper(failing=[3, 6], depth=depth)).peer()
    for id, steps in ((1, 2), (2, 2)):  # steps 1 to 3, then 4 to 6: never two failures in a row
        peer.submit(id, max_tokens=10)
        peer.until(finished(id))
        assert peer.finished[id].reason == FinishReason.ERROR
        assert peer.finished[id].message
        assert peer.tokens[id] == expected()[:steps]
    peer.submit(3, max_tokens=10)
    assert peer.until(finished(3)).tokens[3] == expected(max_tokens=10)


def test_two_failed_steps_in_a_row_end_the_process(start: Callable[..., Stamped]) -> None:
    replica = start(Temper(failing=[2, 3], step_ms=20), sequences=1)
    peer = replica.peer()
    for id in (1, 2, 3):
        peer.submit(id, max_tokens=10)
    peer.until(lambda peer: peer.closed)
    assert {id: finish.reason for id, finish in peer.finished.items()} == dict.fromkeys((1, 2), FinishReason.ERROR)
    assert peer.load.draining, "what was in no failed step is told to go elsewhere"
    assert replica.status() == 1
    assert "closed" not in replica.log.read_text(), "its device may answer no call any more"


# Where it is

EXTENTS = Temper(depth=2, extent_blocks=64, context_tokens=2048)
EXTENT_BYTES = 64 * 16 * 16


def test_a_place_is_answered_at_once_and_at_its_end_to_whoever_sent_one(start: Callable[..., Stamped]) -> None:
    replica = start(EXTENTS)
    machine, gateway = replica.peer(), replica.peer()
    gateway.submit(1, max_tokens=3)
    gateway.until(finished(1))
    machine.place(Residency.MEMORY)
    machine.until(lambda peer: len(peer.placed) == 2)
    first, second = machine.placed
    assert (first.residency, first.device_bytes, first.kv_bytes) == (Residency.DEVICE, *[16 * EXTENT_BYTES] * 2)
    assert (first.min_bytes, first.max_bytes, first.moved_bytes) == (2 * EXTENT_BYTES, 16 * EXTENT_BYTES, 0)
    assert (second.residency, second.device_bytes, second.problem) == (Residency.MEMORY, 0, "")
    assert second.kept_bytes == second.moved_bytes == 2 * 16 * 16, "two whole blocks of a prompt"
    machine.place(Residency.DEVICE, 5 * EXTENT_BYTES)
    machine.until(lambda peer: len(peer.placed) == 3)
    assert (machine.placed[2].residency, machine.placed[2].kv_bytes) == (Residency.DEVICE, 5 * EXTENT_BYTES)
    assert 0 < machine.placed[2].seconds < 5
    gateway.until(lambda peer: peer.load.blocks == 5 * 64)
    assert not gateway.placed
    assert [event["to"] for event in replica.events() if event["event"] == "moved"] == ["MEMORY", "DEVICE"]


def test_a_first_place_that_asks_for_nothing_is_answered_once(start: Callable[..., Stamped]) -> None:
    machine = start(EXTENTS).peer()
    machine.place(Residency.DEVICE)
    machine.until(lambda peer: len(peer.placed) == 1)
    machine.place(Residency.DEVICE, 5 * EXTENT_BYTES)
    machine.until(lambda peer: len(peer.placed) == 2)
    assert [placed.kv_bytes for placed in machine.placed] == [16 * EXTENT_BYTES, 5 * EXTENT_BYTES]
    machine.place(Residency.DEVICE)
    machine.until(lambda peer: len(peer.placed) == 3)


def test_what_comes_while_it_sleeps_waits_and_runs_when_it_is_back(start: Callable[..., Stamped]) -> None:
    replica = start(Temper(depth=2, step_ms=3))
    machine, gateway = replica.peer(), replica.peer()
    gateway.submit(1, max_tokens=900)
    gateway.until(lambda peer: len(peer.tokens.get(1, [])) > 5)
    machine.place(Residency.MEMORY)
    machine.until(lambda peer: len(peer.placed) == 2)
    assert machine.placed[1].seconds < 2.0, "it did not wait for the end of what runs"
    for id in (2, 3):
        gateway.submit(id, [id, id + 1], max_tokens=4)
    gateway.submit(4, deadline_ms=200)
    gateway.until(finished(4))
    assert "waited" in gateway.rejected[4].message
    gateway.cancel(3)
    gateway.until(finished(3))
    pulse = Heartbeat.open(replica.pulse)
    before = pulse.read()[1]
    gateway.until(lambda peer: (peer.load.running, peer.load.waiting, peer.load.blocks) == (0, 2, 0))
    seen = len(gateway.loads)
    gateway.until(lambda peer: len(peer.loads) >= seen + 2)
    assert pulse.read()[1] > before
    machine.socket.close()
    gateway.until(lambda peer: len(peer.loads) >= seen + 4)
    assert gateway.finished.keys() == {3}
    again = replica.peer()
    again.place(Residency.DEVICE)
    gateway.until(finished(1, 2))
    assert gateway.tokens == {1: expected(max_tokens=900), 2: expected([2, 3], 4)}
    again.until(lambda peer: len(peer.placed) == 2)
    assert [each.residency for each in again.placed] == [Residency.MEMORY, Residency.DEVICE]


def test_a_full_queue_is_full_asleep_too(start: Callable[..., Stamped]) -> None:
    peer = start(waiting=2).peer()
    peer.place(Residency.MEMORY)
    for id in (1, 2, 3):
        peer.submit(id, scope=TENANT_A)
    peer.until(lambda peer: 3 in peer.rejected)
    assert peer.rejected[3].reason == RejectReason.BUSY
    peer.place(Residency.DEVICE)
    peer.until(finished(1, 2))


def test_disk_is_no_place_for_a_replica(start: Callable[..., Stamped]) -> None:
    replica = start()
    peer = replica.peer()
    peer.place(Residency.DISK)
    peer.until(lambda peer: peer.closed)
    other = replica.peer()
    other.submit(1)
    assert other.until(finished(1)).tokens == {1: expected()}


def test_the_longest_sequence_fits_what_there_is_at_the_least(start: Callable[..., Stamped]) -> None:
    temper = Temper(blocks=40, extent_blocks=8, context_tokens=256)
    replica = start(temper, public_prefixes=[list(range(64))])
    peer = replica.peer().until(lambda peer: bool(peer.frames))
    assert isinstance(hello := peer.frames[0], Hello)
    assert (hello.blocks, hello.context_tokens) == (40, 256 - 64), "a stamp says nothing of public prefixes"
    peer.place(Residency.DEVICE, 0)
    peer.until(lambda peer: len(peer.placed) == 2)
    assert peer.placed[1].kv_bytes == peer.placed[1].min_bytes
    prompt = list(range(100, 290))
    peer.submit(1, prompt, max_tokens=2)
    assert peer.until(finished(1)).tokens[1] == expected(prompt, 2)


# How the process ends


def test_what_waits_for_a_sleeper_that_is_told_to_end_goes_elsewhere_at_once(
    start: Callable[..., Stamped],
) -> None:
    replica = start()
    peer = replica.peer()
    peer.place(Residency.MEMORY)
    peer.until(lambda peer: len(peer.placed) == 2)
    peer.submit(1)
    peer.until(lambda peer: peer.load.waiting == 1)
    replica.process.send_signal(signal.SIGTERM)
    peer.until(lambda peer: peer.closed)
    assert not peer.finished
    assert peer.load.draining
    assert replica.status() == 0


def test_one_that_is_about_to_sleep_and_told_to_end_finishes_its_work(start: Callable[..., Stamped]) -> None:
    replica = start(Temper(step_ms=5), sequences=1)
    peer = replica.peer()
    for id in (1, 2):
        peer.submit(id, max_tokens=60)
    peer.until(lambda peer: 1 in peer.tokens)
    peer.place(Residency.MEMORY, drain_ms=60_000)
    peer.until(lambda peer: len(peer.placed) == 1)
    replica.process.send_signal(signal.SIGTERM)
    peer.until(lambda peer: peer.load.draining)
    peer.place(Residency.MEMORY)
    peer.until(lambda peer: peer.closed)
    assert peer.tokens == {1: expected(max_tokens=60), 2: expected(max_tokens=60)}
    assert len(peer.placed) == 1
    assert replica.status() == 0


def test_idle_replica_drains_at_once(start: Callable[..., Stamped]) -> None:
    replica = start()
    peer = replica.peer().until(lambda peer: len(peer.frames) >= 2)
    replica.process.send_signal(signal.SIGTERM)
    peer.until(lambda peer: peer.closed)
    assert replica.status() == 0
    assert not os.path.exists(replica.address.removeprefix("unix:"))


@pytest.mark.parametrize("depth", [1, 2])
def test_draining_refuses_new_work_and_finishes_the_old(start: Callable[..., Stamped], depth: int) -> None:
    replica = start(Temper(step_ms=5, depth=depth))
    peer = replica.peer()
    peer.submit(1, max_tokens=200)
    peer.until(lambda peer: 1 in peer.tokens)
    replica.process.send_signal(signal.SIGTERM)
    peer.until(lambda peer: peer.load.draining)
    peer.submit(2)
    peer.until(finished(2))
    assert peer.rejected[2].reason == RejectReason.DRAINING
    assert 1 not in peer.finished
    peer.until(lambda peer: peer.closed)
    assert peer.finished[1].reason == FinishReason.LENGTH
    assert peer.tokens[1] == expected(max_tokens=200)
    assert replica.status() == 0


def test_drain_has_a_deadline_after_which_what_runs_goes_elsewhere(start: Callable[..., Stamped]) -> None:
    replica = start(Temper(step_ms=5, drain_s=0.3), sequences=1)
    peer = replica.peer()
    peer.submit(1, max_tokens=4000)
    peer.submit(2, max_tokens=4000)
    peer.until(lambda peer: 1 in peer.tokens and peer.load.waiting == 1)
    replica.process.send_signal(signal.SIGTERM)
    peer.until(lambda peer: peer.closed)
    assert not peer.finished
    assert peer.load.draining
    assert replica.status() == 0


def test_replica_dies_with_its_parent(tmp_path: Path) -> None:
    replica = Stamped(tmp_path, Temper(step_ms=5))
    command = replica.command(Temper(step_ms=5))
    replica.stop()
    wait = "signal.alarm(60); signal.pause()"
    program = f"import signal, subprocess; print(subprocess.Popen({command!r}).pid, flush=True); {wait}"
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    peer = replica.peer()
    peer.submit(1, max_tokens=4000)
    peer.until(lambda peer: 1 in peer.tokens)
    parent.kill()
    parent.wait(LIMIT_S)
    try:
        peer.until(lambda peer: peer.closed)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


def test_socket_left_by_a_killed_process_is_replaced(start: Callable[..., Stamped]) -> None:
    first = start()
    first.peer().until(lambda peer: len(peer.frames) >= 1)
    first.stop()
    assert os.path.exists(first.address.removeprefix("unix:"))
    second = start()
    peer = second.peer().until(lambda peer: len(peer.frames) >= 1)
    assert isinstance(peer.frames[0], Hello)
    assert peer.frames[0].pid == second.process.pid


# What others see of it


def test_socket_is_for_its_user_alone(calm: Stamped) -> None:
    calm.peer()
    assert os.stat(calm.address.removeprefix("unix:")).st_mode & 0o077 == 0


def test_pulse_beats_while_idle_and_in_steps(start: Callable[..., Stamped]) -> None:
    replica = start(Temper(step_ms=30))
    peer = replica.peer().until(lambda peer: len(peer.frames) >= 2)
    pulse = Heartbeat.open(replica.pulse)
    phase, before = pulse.read()
    assert phase == ReplicaPhase.IDLE
    wait_for(lambda: pulse.read()[1] > before)
    phase, after = pulse.read()
    assert phase == ReplicaPhase.IDLE
    peer.submit(1, max_tokens=30)
    peer.until(lambda peer: 1 in peer.tokens)
    phases = Counter()
    while 1 not in peer.finished:
        phases[pulse.read()[0]] += 1
        peer.read(0.01)
    assert phases.most_common(1)[0][0] == ReplicaPhase.STEP
    assert pulse.read()[1] > after + 30


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a disk that is always full")
def test_a_log_that_cannot_be_written_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "log").symlink_to("/dev/full")
    replica = Stamped(tmp_path)
    try:
        peer = replica.peer()
        peer.submit(1)
        assert peer.until(finished(1)).tokens == {1: expected()}
        replica.process.terminate()
        assert replica.status() == 0
    finally:
        replica.stop()


def test_log_is_lines_of_json_without_tokens(start: Callable[..., Stamped]) -> None:
    replica = start()
    peer = replica.peer()
    peer.submit(1, [777, 778, 779])
    peer.until(finished(1))
    peer.socket.sendall(b"\x00\x00\x00\x02zz")
    peer.until(lambda peer: peer.closed)
    replica.process.terminate()
    replica.status()
    lines = replica.log.read_text().splitlines()
    events = [json.loads(line)["event"] for line in lines]
    assert events == ["loaded", "serving", "connected", "disconnected", "draining", "ended", "closed"]
    assert not re.search(r"777\D{1,4}778", replica.log.read_text())  # one alone may be the digits of a time
