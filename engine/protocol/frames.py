"""What processes say to each other: frames, addresses and how bytes become frames.

A frame is a 4-byte big-endian length followed by one msgpack-encoded tagged struct. The same bytes
travel over `unix:` and `tcp:` sockets. This module knows neither torch nor asyncio nor scheduling.
"""

import enum
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

PROTOCOL: Final = 1
FRAME_BYTES_MAX: Final = 64 << 20
MEMORY_SUFFIX: Final = ".memory.json"
DRIVER_BYTES: Final = 1 << 30  # of a GPU, that a machine leaves to its driver and to whatever else needs a little
MEMORY_SHARE: Final = 0.7  # of the host memory that is free at a machine's start, for models that sleep
_LENGTH: Final = struct.Struct(">I")


class Residency(enum.IntEnum):
    """Where a replica's weights are. It serves on DEVICE alone.

    DISK      there is no process; on the way up they may come from the page cache.
    MEMORY    its process lives and holds them in host memory, or, on a CPU, leaves them to the page cache. It takes
              requests, which wait there.
    DEVICE    they are in a GPU's memory, or, on a CPU, as its matmuls read them.
    """

    DISK = 0
    MEMORY = 1
    DEVICE = 2


class ScopeKind(enum.IntEnum):
    """Who may share a cached prefix. REQUEST shares with nobody and is what a missing scope means."""

    REQUEST = 0
    USER = 1
    TENANT = 2
    PUBLIC = 3


class FinishReason(enum.StrEnum):
    STOP = "stop"  # a stop token, or nothing more that its grammar allows
    LENGTH = "length"  # max_tokens or the end of the context
    CANCELLED = "cancelled"
    ERROR = "error"


class RejectReason(enum.StrEnum):
    TOO_LONG = "too_long"  # can never fit this replica's context or KV pool
    BUSY = "busy"  # the waiting queue is full, or it would wait, or has waited, for longer than it may
    DRAINING = "draining"  # the replica is going away
    INVALID = "invalid"  # a frame that a correct gateway does not send
    GRAMMAR = "grammar"  # the grammar is wrong, asks for what is not supported, or is too large; the message says which


class GrammarKind(enum.StrEnum):
    """What a grammar's source is written in."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"


class Pooling(enum.StrEnum):
    """How a text becomes one vector, or, with SCORE, one number: from which of its tokens."""

    MEAN = "mean"
    CLS = "cls"
    LAST = "last"
    SCORE = "score"


class Grammar(msgspec.Struct, frozen=True, array_like=True):
    """What all of a completion's text must be; it may end only where the text is whole."""

    kind: GrammarKind
    source: str


class Scope(msgspec.Struct, frozen=True, array_like=True):
    """Separates prefix caches. `id` is 16 opaque bytes made in `tenants`; raising `epoch` is a wipe.

    `account` is 16 opaque bytes too: whose turn the request takes among those that wait, whatever it may share. Without
    it `id` says so, and requests without either take the turns of one.
    """

    kind: ScopeKind = ScopeKind.REQUEST
    id: bytes = b""
    epoch: int = 0
    account: bytes = b""


class Terms(msgspec.Struct, frozen=True, array_like=True):
    """How a request's account is treated beside others, as its plan and its settings say.

    weight          its part of what is served while accounts compete; one of 2 gets twice what one of 1 gets.
    sequences       of it that run at once on this replica, None: as many as fit.
    blocks          KV blocks that its running sequences hold at once here, None: as many as there are.
    floor_blocks    cached blocks, of all its scopes, that it keeps while another account has more above its own floor,
    cap_blocks      and those that it keeps unused at most; None in either: what the replica's settings say.
    keep_s          cached blocks of its scope are found for so long after their last use, None: until they are evicted.
    erase           blocks that the request writes or reads are zeroed before anybody else has them. What a raised epoch
                    or keep_s makes unfindable always is.
    background      it runs only on what live requests leave free, and waits for as long as that takes. What the account
                    has running so counts apart from its live requests.
    """

    weight: float = 1.0
    sequences: int | None = None
    blocks: int | None = None
    floor_blocks: int | None = None
    cap_blocks: int | None = None
    keep_s: float | None = None
    erase: bool = False
    background: bool = False


class Sampling(msgspec.Struct, frozen=True, array_like=True):
    """How the next token is chosen. Values are in range: the gateway checked them.

    temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 are off; penalties are off at 1, 0 and 0.
    `seed` is always set (the gateway draws one when the caller gave none), 0 ≤ seed < 2**63.
    `logprobs` is None (off) or how many alternatives to report beside the chosen token (0–20).
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int = 0
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None


class Submit(msgspec.Struct, frozen=True, array_like=True, tag="submit"):
    """gateway → replica: run this prompt. Choices 0…n−1 are the sequences id … id+n−1 of this connection.

    `tokens` is packed u32 little-endian. `stop_ids` end a sequence and are still reported as its last token.
    Choice i samples with seed + i. `deadline_ms` is how long it may wait to start, once it is taken in; 0: for ever.
    `pooling` asks for the prompt's vector instead of a completion.
    """

    id: int
    tokens: bytes
    scope: Scope
    sampling: Sampling
    max_tokens: int
    stop_ids: list[int] = []
    n: int = 1
    traceparent: str = ""
    terms: Terms = Terms()
    deadline_ms: int = 0
    grammar: Grammar | None = None
    pooling: Pooling | None = None


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag="cancel"):
    """gateway → replica: the caller is gone. Unknown and finished ids are ignored."""

    ids: list[int]


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """replica → anyone, first on every connection. `boot` names this start of this replica."""

    protocol: int
    model: str
    revision: str
    boot: str
    pid: int
    context_tokens: int
    vocabulary: int
    block_tokens: int
    blocks: int


class Started(msgspec.Struct, frozen=True, array_like=True):
    """A sequence left the waiting queue; `cached_tokens` of its prompt were read from its own namespace."""

    id: int
    cached_tokens: int
    waited_ms: float


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log probabilities (natural) of one token that sequence `id` emitted, and of its alternatives, best first."""

    id: int
    logprob: float
    top_ids: list[int]
    top_logprobs: list[float]


class Finish(msgspec.Struct, frozen=True, array_like=True):
    """A sequence ended. `message` says what to do about it when the reason is ERROR."""

    id: int
    reason: FinishReason
    completion_tokens: int
    message: str = ""


class Vector(msgspec.Struct, frozen=True, array_like=True):
    """What a prompt with `pooling` became: packed float32 little-endian, not normalised."""

    id: int
    values: bytes


class Progress(msgspec.Struct, frozen=True, array_like=True, tag="progress"):
    """replica → gateway, one per step and connection: columns, not a message per token.

    Sequence ids[i] emitted counts[i] tokens, packed u32 little-endian in `tokens` in that order.
    `logprobs` holds one entry per emitted token of the sequences that asked for them, in the same order.
    """

    ids: list[int]
    counts: list[int]
    tokens: bytes
    started: list[Started] = []
    finished: list[Finish] = []
    logprobs: list[TokenLogprobs] = []
    vectors: list[Vector] = []


class Reject(msgspec.Struct, frozen=True, array_like=True, tag="reject"):
    """replica → gateway: nothing of this Submit ran or will run. At once, or while all of it still waits.

    `retry_after_ms` is for how long one more would wait now, as far as that can be told.
    """

    id: int
    reason: RejectReason
    message: str
    retry_after_ms: int = 0


class Load(msgspec.Struct, frozen=True, array_like=True, tag="load"):
    """replica → anyone, twice a second and when a sequence starts or ends: how full it is.

    `counters` only grow within one boot (prefix hit tokens, evictions by cause, preemptions, …). `shared_blocks` of the
    cached ones are read by two sequences or more at this moment. `background` sequences run or wait beside the others,
    which alone are counted in the first three. `blocks` are those of the pool that have memory now: it may change.
    """

    running: int
    waiting: int
    waiting_tokens: int
    free_blocks: int
    cached_blocks: int
    steps: int
    draining: bool = False
    counters: dict[str, int] = {}
    shared_blocks: int = 0
    background: int = 0
    blocks: int = 0


class Place(msgspec.Struct, frozen=True, array_like=True, tag="place"):
    """machine → replica: where its weights are to be, MEMORY or DEVICE, and how much of the device it may hold there,
    weights, workspace and KV together. A newer one takes an older one's place.

    On the way to MEMORY what runs has `drain_ms` to end; then it is preempted, and goes on when the replica is back.
    Within DEVICE only its KV grows or shrinks. None: as it is.
    """

    residency: Residency
    device_bytes: int | None = None
    drain_ms: int = 0


class Placed(msgspec.Struct, frozen=True, array_like=True, tag="placed"):
    """replica → whoever sent it a Place: where it is, each time that a move ended or failed; where it failed `problem`
    says why, and the rest where it is instead. The first answer to the first Place comes at once, and is the only one
    where that one asks for nothing.

    device_bytes    it holds now; asleep_bytes of them it holds in MEMORY too (what the driver keeps for a process).
    least_bytes     it holds at the least on the device: weights, workspace, KV of one context.
    most_bytes      it could use: the KV of all sequences that it may run.
    memory_bytes    of host memory it holds: weights and kept KV; standby_bytes it holds in MEMORY at the most.
    kv_bytes        of device_bytes are KV; kept_bytes of memory_bytes are.
    weights_bytes   its weights take on the device.
    moved_bytes     the move copied, in `seconds`, from the order to its end.
    """

    residency: Residency
    device_bytes: int = 0
    asleep_bytes: int = 0
    least_bytes: int = 0
    most_bytes: int = 0
    memory_bytes: int = 0
    weights_bytes: int = 0
    kv_bytes: int = 0
    kept_bytes: int = 0
    moved_bytes: int = 0
    seconds: float = 0.0
    problem: str = ""
    standby_bytes: int = 0


class Wake(msgspec.Struct, frozen=True, array_like=True, tag="wake"):
    """gateway → machine: how many of its requests for a model wait for a replica, at each change and at least once a
    second while there are any; 0 ends it. What a connection said ends with it.

    weight         of the heaviest account among them, as its plan says.
    patience_ms    until the first of them gives up.
    """

    model: str
    requests: int
    weight: float = 1.0
    patience_ms: int = 0


class ReplicaState(msgspec.Struct, frozen=True, array_like=True):
    """One replica as its machine sees it. `boot` changes with every start; `problem` says why it is not serving,
    where it does not just rest.

    toward         where it is moving; equal to `residency` where it is not. Whoever finds it moving toward DEVICE with
                   an open connection may submit: it begins as soon as it can.
    ready_ms       until it could serve, as far as the machine can tell, where its model were asked for now; 0 where it
                   serves, −1 where it cannot be: `problem` says why.
    device         index of its device among the machine's, −1: none yet.
    memory         where its bytes are, as it said last.
    quarantined    it has died so often that it is not started for a while.
    """

    model: str
    address: str
    residency: Residency
    boot: int
    problem: str = ""
    toward: Residency = Residency.DISK
    ready_ms: int = 0
    device: int = -1
    memory: Placed | None = None
    quarantined: bool = False


class DeviceState(msgspec.Struct, frozen=True, array_like=True):
    """A GPU, or the memory of a machine without one. `budget_bytes` of its `total_bytes` are for replicas, who hold
    `held_bytes` now."""

    name: str
    total_bytes: int
    budget_bytes: int
    held_bytes: int


class Fleet(msgspec.Struct, frozen=True, array_like=True, tag="fleet"):
    """machine → gateway, on connection and on every change: all replicas of this machine, its devices, and its host
    memory: `memory_bytes` of `memory_budget_bytes` are held by what sleeps or may. `moves` counts by kind, `wake` and
    `sleep`, `start`, `end`, `grow` and `shrink`, and those that failed with `_failed` behind."""

    machine: str
    replicas: list[ReplicaState]
    devices: list[DeviceState] = []
    memory_bytes: int = 0
    memory_budget_bytes: int = 0
    moves: dict[str, int] = {}


Frame = Submit | Cancel | Hello | Progress | Reject | Load | Place | Placed | Wake | Fleet


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One catalogue entry as a machine needs it: where its folder is and how its replicas are sized."""

    name: str
    folder: str
    replicas: int = 1
    dtype: str = "auto"  # auto, float32, bfloat16, float16
    context_tokens: int | None = None  # None: what config.json says
    random_weights: bool = False  # made on the spot instead of read: for measuring, where only config.json is at hand
    kv_dtype: str = "auto"  # auto: as the weights; fp8 (e4m3), on GPUs only: half the bytes, less exact
    kv_bytes: int | None = None  # None: measured from what is left
    block_tokens: int = 16
    step_tokens: int | None = None  # the token budget of one step; None: 512 on a CPU, what gap_ms allows on a GPU
    gap_ms: float = 20.0  # the longest step that prompts may cause while other sequences stream, on a GPU
    sequences: int | None = None  # running at once; None: 64 on a CPU, 512 on a GPU
    waiting: int = 1024  # in the waiting queue at once
    vectors: bool = False  # of a decoder, what its prompts become, and no text; its head is not loaded
    scope_floor_blocks: int = 0  # cached blocks that an account keeps while another has more above its own floor
    scope_cap_blocks: int | None = None  # cached blocks that an account keeps unused at most; None: no cap
    weights_bytes: int = 0  # about what its weights take, before a replica has said so itself; 0: not known
    pinned: bool = False  # it is on the device for good
    priority: float = 1.0  # its requests count so much beside other models' where there is no room for both
    resident_s: float = 0.2  # after a wake it stays at least so long, even where others wait and it has nothing to do
    wake_s: float = 0.5  # its requests wait so long at most while others run; then what is to make room is preempted
    kept_kv_bytes: int = 1 << 30  # of host memory, for the KV of system prompts while it sleeps; 0: none is kept
    public_prefixes: list[list[int]] = []  # token ids, computed at load and cached for good, for everybody to read


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Where a replica's memory went, in bytes, as it began to serve: a JSON file beside its pulse, while it runs."""

    model: str
    pid: int
    device: str  # as the driver names it, or cpu
    device_bytes: int  # all that the device has, others' share included
    weights_bytes: int
    coded_bytes: int = 0  # of these, what is in 12 bits a number
    bf16_bytes: int = 0  # what the weights would take without that; 0: as much as they do
    kv_blocks: int
    kv_block_tokens: int
    kv_bytes: int
    workspace_bytes: int = 0  # what a step needs beside these
    graphs_bytes: int = 0
    free_bytes: int  # left to nobody


class Inspected(msgspec.Struct, frozen=True, kw_only=True):
    """What `python -m engine.weights.validate` found of a folder's weights, from headers alone."""

    numbers: int  # that a replica would load
    coded_numbers: int = 0  # of these, in 12 bits each where a GPU has them in bfloat16
    coded_bytes: int = 0  # what these take there


class Warmed(msgspec.Struct, frozen=True, kw_only=True):
    """What `python -m engine.execution.warmup` found or prepared of what starts of a model take over."""

    needed: bool  # there is something that later starts would have to find out
    found: bool  # it was there already
    seconds: float
    files: list[str] = []  # where it is now


def memory_path(pulse: str | os.PathLike[str]) -> Path:
    """The file of the replica that beats in `pulse`."""
    return Path(pulse).with_suffix(MEMORY_SUFFIX)


class Telemetry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where spans are sent: an OTLP endpoint over HTTP, and the service.name that replicas add `-replica` to."""

    otlp_url: str
    service: str = "hearth"


class MachineSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that `python -m engine.host.agent` is told, as one JSON document."""

    name: str
    address: str  # where gateways connect for Fleet
    folder: str  # sockets, pulses and logs of this machine
    models: list[ModelSpec]
    cache: str | None = None  # compiled kernels are kept here from start to start; None: below `folder`
    device: str = "auto"  # auto, cpu, cuda: the GPU with the most room for each replica, or cuda:N for all
    device_bytes: int | None = None  # of each GPU, or of a CPU's memory, for replicas; None: all that is there
    memory_bytes: int | None = None  # of host memory, for models that sleep; None: a share of what is there
    threads: int | None = None  # CPU threads per replica; None: shared evenly
    telemetry: Telemetry | None = None  # None: no traces


class ReplicaSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that `python -m engine.replica.server` is told, as one JSON document."""

    model: ModelSpec
    address: str  # where gateways connect
    pulse: str  # the file of engine/process/heartbeat.py that the machine watches
    boot: int
    device: str = "auto"  # auto, cpu, cuda: the first that the process sees
    device_bytes: int | None = None  # of the device, in all, that it may hold at first; None: all that is free
    standby: bool = False  # it will be sent to sleep: its weights are copied to host memory ahead
    threads: int | None = None
    telemetry: Telemetry | None = None


class FrameError(ValueError):
    """The peer sent bytes that are no frame of this protocol; the connection must be closed."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Frame)


def encode(frame: Frame) -> bytes:
    """The frame's bytes on the wire, its length included."""
    body = _encoder.encode(frame)
    assert len(body) <= FRAME_BYTES_MAX, f"a frame of {len(body)} bytes"
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Cuts a byte stream into frames. Feed it what the socket gave; it yields every whole frame."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def feed(self, received: bytes) -> Iterator[Frame]:
        """Raises FrameError on a length over FRAME_BYTES_MAX or a body that is no frame."""
        pending = self._pending
        pending += received
        start = 0
        try:
            while len(pending) - start >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(pending, start)
                if length > FRAME_BYTES_MAX:
                    raise FrameError(f"a frame of {length} bytes is over the limit of {FRAME_BYTES_MAX}")
                end = start + _LENGTH.size + length
                if len(pending) < end:
                    break
                body = bytes(pending[start + _LENGTH.size : end])
                start = end
                try:
                    yield _decoder.decode(body)
                except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                    raise FrameError(f"a body that is no frame: {error}") from error
        finally:
            del pending[:start]


class AddressError(ValueError):
    """An address string that names no socket, or one that may not be used in plain text."""


def parse_address(address: str) -> str | tuple[str, int]:
    """`unix:/path` → the path; `tcp:host:port` → (host, port). Plain tcp is refused outside loopback."""
    scheme, _, rest = address.partition(":")
    if scheme == "unix" and rest:
        return rest
    if scheme == "tcp":
        host, _, port = rest.rpartition(":")
        if not host or not port.isdigit():
            raise AddressError(f"{address!r} is not tcp:HOST:PORT")
        if host not in ("127.0.0.1", "localhost", "[::1]"):
            raise AddressError(f"{address!r} is outside loopback: plain tcp: would carry prompts in the clear")
        return host.strip("[]"), int(port)
    raise AddressError(f"{address!r} is neither unix:PATH nor tcp:HOST:PORT")
