"""Many models on few devices, as their callers notice it: `hearth serve` over HTTP, with room for two of them at once.

    python -m benchmarks.engine.standby --device cuda --part wake|zipf|start [--minutes 5]
    python -m benchmarks.engine.standby --device cuda --part zipf --models 20 --over-commit 6 --minutes 3
    python -m benchmarks.engine.standby --device cpu --part wake|zipf|start [--minutes 1]

wake   a request comes for a model that sleeps, beside one that is awake: the time to its first token, with a prompt of
       128 tokens, and with one of 4,096 and more of which the model had all but the last ones cached when it went to
       sleep. And how long a model takes to leave: from the request that needs its room until the driver has it.
zipf   six models (on a CPU four) are asked for as Zipf has it, two requests a second; then the same requests go to the
       two that are asked for most, which is what the others' tokens per second are held against. Writes what was asked
       to results/standby_trace.csv too, for the policy's simulation. On a GPU of other `--models` the rows have their
       number in their names; awake all together they would take `--over-commit` times the device's budget. Models that
       host memory has no room for start from the page cache. Twenty models are done within ten minutes: up to four
       until all have been started, three of requests, one of the two alone; the rows of waits come before that one.
start  a replica from a zygote and from a cold process, weights in the page cache and on the disk, without HTTP:
       until the first token of a prompt of 128 tokens.

On a GPU all models are llama-3.1-8b's geometry, with weights made up once and written to `--folder`. On a CPU they are
the built-in model and three random ones of its size. Each wait has its limit; rows are written as they are known.
"""

import argparse
import asyncio
import csv
import ctypes
import json
import os
import random
import shutil
import socket
import statistics
import sys
import tempfile
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from benchmarks.record import RESULTS, record
from engine.host.forkserver import ForkserverLauncher
from engine.host.launchers import replica_command, zygote_modules
from engine.host.supervisor import ReplicaLauncher, SubprocessLauncher
from engine.hostinfo.memory import available_memory_bytes
from engine.process.heartbeat import Heartbeat, ReplicaPhase
from engine.protocol import frames
from engine.protocol.specs import MachineSpec, ModelSpec, ReplicaSpec
from engine.protocol.types import SamplingParams, Scope
from gateway.admin.machines import MachineReplicaItem, MachinesItem
from gateway.bench.client import LoadMeasurement, Target, send_request
from gateway.bench.load import word_of_id
from gateway.bench.server import running_server, tokenizer
from gateway.catalogue.catalogue import BUILT_IN
from gateway.commands.access.gateway_client import OperatorClient, operator_token

GEOMETRY: Final = "llama-3.1-8b"
BUILT_IN_FOLDER: Final = Path(__file__).parents[2] / "engine" / "builtin_model"
TRACE: Final = RESULTS / "standby_trace.csv"
COPY_BYTES_S: Final = 55e9  # from pinned host memory to an H200, measured
AWAKE_BYTES: Final = 18_500_000_000  # of a device, that a model takes with KV of 8,192 tokens
ROOM_FOR_TWO: Final = 46 << 30
STANDBY_BYTES: Final = 17 << 30  # of host memory, for a model that sleeps
HOST_KEPT_BYTES: Final = 40 << 30  # of host memory, for processes and the page cache of the weights' files
PER_SECOND: Final = 2.0
PROMPT_TOKENS: Final = 128
PREFIX_TOKENS: Final = 4096
ANSWER_TOKENS: Final = (16, 48)
ZIPF_MODELS: Final = 6
STARTS: Final = 3
_PREPARED_S: Final = 240.0
_MOVED_S: Final = 30.0
_CALM_S: Final = 10.0  # then who is awake has been copied to host memory too
_ANSWER_S: Final = 60.0
_STARTED_S: Final = 240.0


@dataclass(frozen=True, slots=True)
class Asked:
    at: float
    model: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Answered:
    """Seconds after the trace began; of a request that failed `problem` says why."""

    asked: Asked
    first_s: float
    ended_s: float
    tokens: int
    cached: int
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Models:
    """What is served: `settings` is hearth.toml. Without a `vocabulary` of words prompts are English. Host memory has
    room for `standing` of them."""

    names: list[str]
    settings: str
    vocabulary: int | None
    standing: int


# What is served


def on_gpu(folder: Path, contexts: Sequence[int], over_commit: float | None) -> Models:
    """One model of the geometry for each context, and room for two of 8,192 tokens, or for a part of them all."""
    names = [f"@cf/bench/m{index}" for index in range(len(contexts))]
    device_bytes = int(len(names) * AWAKE_BYTES / over_commit) if over_commit else ROOM_FOR_TWO
    standing = min(len(names), max(6, (available_memory_bytes() - HOST_KEPT_BYTES) // STANDBY_BYTES))
    say(f"host memory is given to {standing} of {len(names)} models, {device_bytes / 1e9:.1f} GB of the device to all")
    settings = f"[machine]\ndevice_bytes = {device_bytes}\nmemory_bytes = {standing * STANDBY_BYTES}\n"
    for name, context in zip(names, contexts, strict=True):
        settings += _entry(name, folder) + f"context_tokens = {context}\n"
    settings += f'\n[[models]]\nname = "{BUILT_IN}"\nserve = false\n'
    return Models(names, settings, json.loads((folder / "config.json").read_text())["vocab_size"], standing)


def on_cpu(folder: Path) -> Models:
    """The built-in model and three of its size, and room for two: of each, weights in float32 and some KV."""
    weights_bytes = 2 * _bytes_of(BUILT_IN_FOLDER)
    shutil.copytree(BUILT_IN_FOLDER, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    make_weights(folder, "cpu", 1)
    names = [BUILT_IN, *(f"@cf/bench/m{index}" for index in (1, 2, 3))]
    settings = f"[machine]\ndevice_bytes = {weights_bytes * 26 // 10}\nthreads = 1\n"
    for name in names:
        settings += _entry(name, BUILT_IN_FOLDER if name == BUILT_IN else folder)
        settings += f'context_tokens = 512\ndtype = "float32"\nkv_bytes = {16 << 20}\n'
    return Models(names, settings, None, len(names))


def _entry(name: str, folder: Path) -> str:
    """With the settings that a model has where nobody says anything."""
    return f'\n[[models]]\nname = "{name}"\nfolder = "{folder}"\nprice = {{ input = 0.0, output = 0.0 }}\n'


def write_model(folder: Path) -> Path:
    """The geometry with weights and a tokenizer, made up; what an earlier run wrote is kept."""
    from engine.bench.geometries import write_folder

    if not (folder / "tokenizer.json").exists():
        make_weights(write_folder(GEOMETRY, folder), "cuda", 4)
        vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer(vocabulary)))
    return folder


def make_weights(folder: Path, device: str, shards: int) -> None:
    """Drawn there, and written as checkpoints are."""
    import torch
    from safetensors.torch import save_file

    from engine.models.config import read_decoder_config
    from engine.models.weight_names import decoder_entries

    began, index = time.monotonic(), {}
    draw = torch.Generator(device).manual_seed(0)
    sources = [source for entry in decoder_entries(read_decoder_config(folder)) for source in entry.sources]
    for shard in range(shards):
        tensors = {}
        for source in sources[shard::shards]:
            drawn = torch.empty(source.shape, dtype=torch.bfloat16, device=device)
            norm = len(source.shape) == 1
            tensors[source.name] = (drawn.fill_(1) if norm else drawn.normal_(0, 0.02, generator=draw)).cpu()
        save_file(tensors, folder / f"model-{shard}.safetensors")
        index.update(dict.fromkeys(tensors, f"model-{shard}.safetensors"))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    if device == "cuda":
        torch.cuda.empty_cache()
    say(f"wrote {_bytes_of(folder) / 1e9:.2f} GB of weights in {time.monotonic() - began:.1f} s")


def _bytes_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


class Hearth:
    """A server that runs, as a client and as its operator."""

    def __init__(self, target: Target, gateway: OperatorClient, models: Models) -> None:
        self.models = models
        self._target = target
        self._gateway = gateway
        self._draw = random.Random(0)

    def replicas(self) -> dict[str, MachineReplicaItem]:
        (machine,) = msgspec.json.decode(self._gateway.ask("machines"), type=MachinesItem).machines
        return {replica.model: replica for replica in machine.replicas}

    def moves(self) -> dict[str, int]:
        (machine,) = msgspec.json.decode(self._gateway.ask("machines"), type=MachinesItem).machines
        return machine.moves

    def await_places(
        self, is_reached: Callable[[dict[str, MachineReplicaItem]], bool], within_s: float, what: str
    ) -> None:
        """Until nothing moves and it is as wanted. Raises TimeoutError, and RuntimeError for one that has failed."""
        began = time.monotonic()
        said_at, places = began, ""
        while time.monotonic() < began + within_s:
            seen = self.replicas()
            if all(one.toward == one.residency for one in seen.values()) and is_reached(seen):
                return
            places = ", ".join(f"{model} {one.residency} {one.problem}" for model, one in seen.items())
            if any(one.quarantined for one in seen.values()):
                raise RuntimeError(places)
            if time.monotonic() > said_at + 10:
                said_at = time.monotonic()
                say(f"{said_at - began:.0f} s, {what}: {places}")
            time.sleep(0.02)
        raise TimeoutError(f"not within {within_s:.0f} s: {what}; {places}")

    async def ask(self, model: str, tokens: int, prompt: str, began: float, asked: Asked) -> Answered:
        raw = {"prompt": prompt, "raw": True, "temperature": 0, "max_tokens": tokens, "stream": True}
        measured, sent = LoadMeasurement(), time.monotonic()
        problem = ""
        try:
            async with asyncio.timeout(_ANSWER_S):
                await send_request(self._target._replace(model=model), json.dumps(raw).encode(), measured)
        except (OSError, EOFError, ValueError) as error:
            problem = str(error) or type(error).__name__
        ended = time.monotonic()
        first_s = measured.first_ms[0] / 1e3 if measured.first_ms else ended - sent
        return Answered(asked, first_s, ended - began, measured.completion_tokens, measured.cached_tokens, problem)

    def once(self, model: str, prompt: str, tokens: int = 4) -> Answered:
        """One request, alone. Raises RuntimeError where it fails."""
        now = time.monotonic()
        answered = asyncio.run(self.ask(model, tokens, prompt, now, Asked(0.0, model, tokens)))
        if answered.problem:
            raise RuntimeError(f"{model}: {answered.problem}")
        return answered

    def prompt(self, tokens: int) -> str:
        """About so many tokens, exactly so many where every word is one; never the same ones again."""
        if self.models.vocabulary is None:
            return " ".join(self._draw.choices(("harbour", "lantern", "copper", "meadow", "winter"), k=tokens // 2))
        return " ".join(word_of_id(self._draw.randrange(self.models.vocabulary)) for _ in range(tokens))


@contextmanager
def hearth(models: Models, device: str) -> Iterator[Hearth]:
    """Once every model has been started."""
    with tempfile.TemporaryDirectory(prefix="hearth-standby-") as name, \
            running_server(models.settings, Path(name), device) as (config, known, _), \
            operator_token(config, None, None) as token:  # fmt: skip
        running = Hearth(
            Target(known.base_url, known.account_id, known.token, ""), OperatorClient(config, None, token), models
        )
        try:
            prepared = {"DEVICE", "MEMORY"}
            running.await_places(
                lambda seen: sum(one.residency in prepared for one in seen.values()) >= models.standing,
                _PREPARED_S,
                "models are started",
            )
            time.sleep(_CALM_S)
            yield running
            say(f"moves in all: {running.moves()}")
        except BaseException:
            log = config.state / "machine.log"
            print(log.read_text(errors="replace")[-6000:] if log.exists() else "no machine.log", file=sys.stderr)
            raise


# wake


def measure_wakes(running: Hearth, device: str, rounds: int) -> None:
    """On a CPU the one that leaves makes room first; on a GPU the last model holds the room of two, so that after it
    the first one's wake makes the other's without waiting for room."""
    if device == "cpu":
        waits = [_wake_any(running) for _ in range(rounds)]
        _row("wake-ember-cpu", statistics.median(waits), "s", 0.3)
        return
    first, second, large = running.models.names
    memory = DeviceMemory()
    system = running.prompt(PREFIX_TOKENS)
    for _ in range(3):
        running.once(second, f"{system} {running.prompt(64)}")
    plain: list[Answered] = []
    cached: list[Answered] = []
    beside, leaving = [], []
    for number in range(2 * rounds):
        _wake(running, large, awake={large})
        with memory.watched() as seen:
            beside.append(_wake(running, first, awake={first}))
        leaving.append(seen.seconds_until_freed(_bytes_held(running, first) * 8 // 10))
        prompt = f"{system} {running.prompt(64)}" if number % 2 else running.prompt(PROMPT_TOKENS)
        answered = _wake(running, second, awake={first, second}, prompt=prompt)
        (cached if number % 2 else plain).append(answered)
        say(f"{number}: {answered.first_s:.3f} s, {answered.cached} cached; freed after {leaving[-1]:.3f} s")
    weights_bytes = running.replicas()[first].weights_bytes
    copy_s = weights_bytes / COPY_BYTES_S
    _row("wake-8b", _median(plain), "s", copy_s)
    _row("wake-8b behind one that leaves first", _median(beside), "s", copy_s)
    if min(one.cached for one in cached) >= PREFIX_TOKENS - 64:
        kv_bytes = PREFIX_TOKENS * 128 * 1024
        _row("wake-8b-prefix-4096", _median(cached), "s", (weights_bytes + kv_bytes) / COPY_BYTES_S)
    else:
        say(f"the prefix did not come back: {[one.cached for one in cached]} tokens were cached")
    _row("sleep-8b", statistics.median(leaving), "s", 0.15)


def _wake(running: Hearth, model: str, awake: set[str], prompt: str | None = None) -> Answered:
    """Asks for one that sleeps, and waits until these are awake and the others asleep."""
    assert running.replicas()[model].residency == "MEMORY", f"{model} is awake"
    answered = running.once(model, prompt or running.prompt(PROMPT_TOKENS))
    running.await_places(
        lambda seen: all((one.residency == "DEVICE") is (name in awake) for name, one in seen.items()),
        _MOVED_S,
        f"{' and '.join(sorted(awake))} are awake",
    )
    time.sleep(0.3)
    return answered


def _wake_any(running: Hearth) -> float:
    asleep = next(name for name, one in running.replicas().items() if one.residency == "MEMORY")
    answered = running.once(asleep, running.prompt(PROMPT_TOKENS))
    running.await_places(lambda seen: seen[asleep].residency == "DEVICE", _MOVED_S, f"{asleep} is awake")
    say(f"{asleep}: {answered.first_s:.3f} s")
    time.sleep(0.3)
    return answered.first_s


def _bytes_held(running: Hearth, model: str) -> int:
    return running.replicas()[model].weights_bytes


class DeviceMemory:
    """What the driver counts as used of the first GPU."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libnvidia-ml.so.1")
        self._device = ctypes.c_void_p()
        assert self._library.nvmlInit_v2() == 0
        assert self._library.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(self._device)) == 0

    def used_bytes(self) -> int:
        counted = (ctypes.c_ulonglong * 3)()  # total, free, used
        assert self._library.nvmlDeviceGetMemoryInfo(self._device, ctypes.byref(counted)) == 0
        return counted[2]

    @contextmanager
    def watched(self) -> Iterator["Watched"]:
        seen, ended = Watched([(time.monotonic(), self.used_bytes())]), threading.Event()

        def look() -> None:
            while not ended.wait(0.001):
                seen.used.append((time.monotonic(), self.used_bytes()))

        thread = threading.Thread(target=look)
        thread.start()
        try:
            yield seen
        finally:
            ended.set()
            thread.join()


@dataclass(frozen=True, slots=True)
class Watched:
    used: list[tuple[float, int]]  # when, and bytes

    def seconds_until_freed(self, bytes_freed: int) -> float:
        began, before = self.used[0]
        freed = [at - began for at, used in self.used if used <= before - bytes_freed]
        assert freed, f"{bytes_freed:,} bytes were never free"
        return freed[0]


def _median(answers: Sequence[Answered]) -> float:
    return statistics.median(one.first_s for one in answers)


# zipf


def zipf(names: Sequence[str], seconds: float, seed: int) -> list[Asked]:
    """Poisson arrivals; the model of rank i is asked for as often as 1 ÷ i."""
    draw, at, trace = random.Random(seed), 0.0, []
    weights = [1 / rank for rank in range(1, len(names) + 1)]
    while (at := at + draw.expovariate(PER_SECOND)) < seconds:
        trace.append(Asked(round(at, 3), draw.choices(names, weights)[0], draw.randint(*ANSWER_TOKENS)))
    return trace


async def play(running: Hearth, trace: Sequence[Asked]) -> list[Answered]:
    """Each at its time, whatever is still open."""
    began, said_at = time.monotonic(), 0.0
    tasks = []
    async with asyncio.TaskGroup() as group:
        for request in trace:
            prompt = running.prompt(PROMPT_TOKENS)
            await asyncio.sleep(began + request.at - time.monotonic())
            tasks.append(group.create_task(running.ask(request.model, request.tokens, prompt, began, request)))
            if request.at > said_at + 15:
                said_at = request.at
                done = [task.result() for task in tasks if task.done()]
                failed = sum(bool(one.problem) for one in done)
                say(f"{said_at:.0f} s: {len(done)} answered, {failed} failed, p95 {_percentile(done, 95):.3f} s")
    return [task.result() for task in tasks]


def measure_zipf(running: Hearth, device: str, minutes: float, seed: int) -> None:
    names = running.models.names
    trace = zipf(names, 60 * minutes, seed)
    answers = asyncio.run(play(running, trace))
    failed = [one for one in answers if one.problem]
    for one in failed[:5]:
        say(f"failed at {one.asked.at:.1f} s, {one.asked.model}: {one.problem}")
    usual = len(names) == (ZIPF_MODELS if device == "cuda" else 4)
    where = ("" if device == "cuda" else "-cpu") + ("" if usual else f"-{len(names)}")
    _row(f"zipf-p95-ttft{where}", _percentile(answers, 95), "s", 0.8 if device == "cuda" and usual else None)
    _row(f"zipf-p50-ttft{where}", _percentile(answers, 50), "s", None)
    _row(f"zipf-errors{where}", len(failed) / len(answers), "ratio", 0.0)
    if usual:
        _write_trace(answers)
    until = min(60.0, 60 * minutes)
    begun = [request for request in trace if request.at < until]
    two = [Asked(one.at, names[index % 2], one.tokens) for index, one in enumerate(begun)]
    for name in names[:2]:
        running.once(name, running.prompt(PROMPT_TOKENS))
    alone = asyncio.run(play(running, two))
    shared = [one for one in answers if one.asked.at < until]
    say(f"{_tokens_per_s(shared):.1f} tokens/s of all models, {_tokens_per_s(alone):.1f} of two alone")
    _row(f"zipf-throughput{where}", _tokens_per_s(shared) / _tokens_per_s(alone), "ratio", 0.8)


def _write_trace(answers: Sequence[Answered]) -> None:
    with TRACE.open("w", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(("arrival_s", "model", "tokens"))
        rows.writerows((one.asked.at, one.asked.model, one.tokens) for one in answers)


def _tokens_per_s(answers: Sequence[Answered]) -> float:
    seconds = max(one.ended_s for one in answers) - min(one.asked.at for one in answers)
    return sum(one.tokens for one in answers) / seconds


def _percentile(answers: Sequence[Answered], percent: int) -> float:
    """The percentile of the times to the first token; a failed request counts as waiting for as long as it was open."""
    in_order = sorted(one.first_s for one in answers)
    return in_order[min(len(in_order) - 1, len(in_order) * percent // 100)] if in_order else 0.0


# start


def measure_starts(folder: Path, device: str) -> None:
    """The first start of all is not counted: it compiles what later ones find."""
    where = "" if device == "cuda" else "-cpu"
    machine = MachineSpec(name="bench", address="", folder="", models=[], device=device)
    cold = SubprocessLauncher(replica_command)
    say(f"the first start: {_first_token_s(cold, folder, device):.2f} s")
    _row(f"cold-start{where}", _median_start_s(cold, folder, device), "s", 7.0 if device == "cuda" else None)
    with closing(ForkserverLauncher(zygote_modules(machine), cold, time.monotonic)) as warm:
        began = time.monotonic()
        while not warm.ready(time.monotonic()) or warm.zygote is None:
            assert time.monotonic() < began + _STARTED_S, "there is no zygote"
            time.sleep(0.01)
        say(f"a zygote after {time.monotonic() - began:.2f} s")
        _row(f"warm-start{where}", _median_start_s(warm, folder, device), "s", 2.5 if device == "cuda" else None)
        if device == "cuda":
            read_s = _read_s(folder)
            _forget_pages(folder)
            from_disk = _first_token_s(warm, folder, device)
            say(f"the disk gives {_bytes_of(folder) / read_s / 1e9:.2f} GB/s")
            _row("disk-start", from_disk, "s", read_s)


def _median_start_s(starts: ReplicaLauncher, folder: Path, device: str) -> float:
    times_s = [_first_token_s(starts, folder, device) for _ in range(STARTS)]
    say(", ".join(f"{seconds:.2f} s" for seconds in times_s))
    return statistics.median(times_s)


def _first_token_s(starts: ReplicaLauncher, folder: Path, device: str) -> float:
    """From the order to start a replica to the first token of a prompt; then it ends."""
    with tempfile.TemporaryDirectory(prefix="hearth-start-") as name:
        model = ModelSpec(name="@cf/bench/started", folder=str(folder), context_tokens=8192)
        address, pulse = f"unix:{name}/replica.sock", Path(name) / "replica.pulse"
        Heartbeat.create(pulse).close()
        spec = ReplicaSpec(model=model, address=address, pulse=str(pulse), boot=1, device=device)
        began = time.monotonic()
        process = starts.start(spec, {"CUDA_VISIBLE_DEVICES": "0"} if device == "cuda" else {})
        drain = threading.Thread(target=_drain, args=(process.output,), daemon=True)
        drain.start()
        try:
            imported = _imported_at(pulse)
            with closing(_connected(address.partition(":")[2], began)) as peer:
                served, token = time.monotonic(), _first_token_at(peer)
            parts = ", ".join(f"{at - began:.2f}" for at in (imported, served, token))
            say(f"imported, serving and first token after {parts} s")
            return token - began
        finally:
            process.terminate()
            process.wait()
            drain.join(5)
            process.close()


def _imported_at(pulse: Path) -> float:
    """When it has all its modules, and begins to load."""
    until = time.monotonic() + _STARTED_S
    with closing(Heartbeat.open(pulse)) as seen:
        while seen.read()[0] is ReplicaPhase.STARTING and time.monotonic() < until:
            time.sleep(0.002)
    return time.monotonic()


def _drain(output: int) -> None:
    while os.read(output, 1 << 16):
        pass


def _connected(path: str, began: float) -> socket.socket:
    while time.monotonic() < began + _STARTED_S:
        peer = socket.socket(socket.AF_UNIX)
        try:
            peer.connect(path)
            return peer
        except OSError:
            peer.close()
            time.sleep(0.002)
    raise TimeoutError("the replica does not answer")


def _first_token_at(peer: socket.socket) -> float:
    ids = array("I", (2 + number * 7 % 1000 for number in range(PROMPT_TOKENS)))
    submit = frames.Submit(id=1, tokens=ids.tobytes(), scope=Scope(), sampling=SamplingParams(), max_tokens=2)
    peer.settimeout(_STARTED_S)
    peer.sendall(frames.encode_frame(submit))
    reader = frames.FrameReader()
    while received := peer.recv(1 << 16):
        for frame in reader.feed(received):
            if isinstance(frame, frames.StepOutputs) and frame.tokens:
                return time.monotonic()
            assert not isinstance(frame, frames.Reject), frame
    raise EOFError("the replica ended")


def _forget_pages(folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _read_s(folder: Path) -> float:
    """How long the disk takes for all of it, with a reader for each file."""
    _forget_pages(folder)
    readers = [threading.Thread(target=_read, args=(path,)) for path in folder.glob("*.safetensors")]
    began = time.monotonic()
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    return time.monotonic() - began


def _read(path: Path) -> None:
    buffer = bytearray(16 << 20)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


# All


def _row(shape: str, value: float, unit: str, bound: float | None) -> None:
    record("standby", shape, round(value, 4), unit, bound=None if bound is None else round(bound, 4))


def say(words: str) -> None:
    print(words, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--part", choices=("wake", "zipf", "start"), required=True)
    parser.add_argument("--rounds", type=int, default=12, help="of each kind of wake")
    parser.add_argument("--minutes", type=float, default=5.0, help="of requests")
    parser.add_argument("--models", type=int, default=ZIPF_MODELS, help="of zipf on a GPU")
    parser.add_argument("--over-commit", type=float, help="of zipf on a GPU: awake models ÷ its budget; else 46 GiB")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / f"hearth-{GEOMETRY}")
    options = parser.parse_args()
    cuda = options.device == "cuda"
    if cuda:
        import torch  # noqa: F401  rows name the GPU where it is imported
    folder = write_model(options.folder) if cuda else BUILT_IN_FOLDER
    if options.part == "start":
        measure_starts(folder, options.device)
        return
    with tempfile.TemporaryDirectory(prefix="hearth-models-") as name:
        contexts = [8192, 8192, 131072] if options.part == "wake" else [8192] * options.models
        models = on_gpu(folder, contexts, options.over_commit) if cuda else on_cpu(Path(name) / "random")
        with hearth(models, options.device) as running:
            if options.part == "wake":
                measure_wakes(running, options.device, options.rounds)
            else:
                measure_zipf(running, options.device, options.minutes, options.seed)


if __name__ == "__main__":
    main()
