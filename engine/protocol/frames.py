"""The messages between processes, and how bytes become frames.

A frame is a 4-byte big-endian length followed by one msgpack-encoded tagged struct. The same bytes travel over `unix:`
and `tcp:` sockets. This module knows neither torch nor asyncio nor scheduling.
"""

import struct
from collections.abc import Iterable, Iterator
from typing import Final, get_args

import msgspec

from engine.protocol.cache_frames import HandOver, HandOverFailed, HeldPrefixes, RaiseEpochs, RouteKey
from engine.protocol.types import (
    FinishReason,
    GivenTokens,
    Grammar,
    ImageInput,
    Pooling,
    PrefillLoad,
    RankLoad,
    RejectReason,
    ReplicaRole,
    Residency,
    SamplingParams,
    SchedulingTerms,
    Scope,
    TierLoad,
)

PROTOCOL_VERSION: Final = 3
# What the version before can read: frames have only gained fields at their ends, which it leaves out.
PROTOCOL_OLDEST: Final = 2
FRAME_BYTES_MAX: Final = 64 << 20
_LENGTH: Final = struct.Struct(">I")
_ADVICE: Final = "install the same hearth on both sides"


class Submit(msgspec.Struct, frozen=True, array_like=True, tag="submit"):
    """gateway → replica: run this prompt. Choices 0…n−1 are the sequences id … id+n−1 of this connection.

    `tokens` is packed u32 little-endian. `stop_ids` end a sequence and are still reported as its last token. Choice i
    samples with seed + i. `deadline_ms` is how long it may wait to start, once it is taken in; 0: for ever. `pooling`
    asks for the prompt's vector instead of a completion.

    With `given` the request goes on that another replica began, and its tokens are those that it would have had there:
    sequence id + k is choice given[k].choice, which has emitted these tokens and now emits the next ones; n of the
    choices have not ended. Replicas that speak a protocol below 3 do not know it.

    Where the prompt has `images`, its tokens are 2³¹ and above, which replicas that know no images refuse. It may be
    served in its `regions` alone, where there are any: replicas elsewhere refuse, and whose Hello names none gets none.
    """

    id: int
    tokens: bytes
    scope: Scope
    sampling: SamplingParams
    max_tokens: int
    stop_ids: list[int] = []
    n: int = 1
    traceparent: str = ""
    terms: SchedulingTerms = SchedulingTerms()
    deadline_ms: int = 0
    grammar: Grammar | None = None
    pooling: Pooling | None = None
    given: list[GivenTokens] = []
    images: list[ImageInput] = []
    regions: list[str] = []


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag="cancel"):
    """gateway → replica: the caller is gone. Unknown and finished ids are ignored."""

    ids: list[int]


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """replica → anyone, first on every connection. `boot` names this start of this replica.

    `protocol` is the oldest version that it speaks, and `newest_protocol` the newest: a peer of the version before
    reads the first alone. `digest` differs where weights, tokenizer, chat template or KV layout do, and behind a "/"
    where sums are added up in another number of parts, one for each GPU. `handover` is where it takes in the KV of
    sequences that other replicas began; empty: nowhere. `raises_epochs`: it takes RaiseEpochs, `names_prefixes`: and
    RouteKey. `image_tokens` are what an image becomes in a prompt, 0 where it takes none. `region` is where its host
    is, by that host's certificate; empty: nowhere that has a name. `polled`: it takes PollLoad. It runs `max_sequences`
    at once, 0: it does not say; more of them wait there.
    """

    protocol: int
    model: str
    revision: str
    boot: str
    pid: int
    context_tokens: int
    vocabulary: int
    block_tokens: int
    blocks: int
    newest_protocol: int = 0
    digest: str = ""
    handover: str = ""
    raises_epochs: bool = False
    image_tokens: int = 0
    names_prefixes: bool = False
    region: str = ""
    polled: bool = False
    max_sequences: int = 0

    @property
    def resumes(self) -> bool:
        """Whether it takes Submits with tokens `given`."""
        return self.newest_protocol >= 3


class SequenceStarted(msgspec.Struct, frozen=True, array_like=True):
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


class SequenceFinished(msgspec.Struct, frozen=True, array_like=True):
    """A sequence ended. `message` says what to do about it when the reason is ERROR or GRAMMAR. `completion_tokens` are
    all that its choice emitted, those given among them."""

    id: int
    reason: FinishReason
    completion_tokens: int
    message: str = ""


class PoolingOutput(msgspec.Struct, frozen=True, array_like=True):
    """The vector of a prompt with `pooling`: packed float32 little-endian, not normalised."""

    id: int
    values: bytes


class StepOutputs(msgspec.Struct, frozen=True, array_like=True, tag="progress"):
    """replica → gateway, one per step and connection: columns, not a message per token.

    Sequence ids[i] emitted counts[i] tokens, packed u32 little-endian in `tokens` in that order. `logprobs` holds one
    entry per emitted token of the sequences that asked for them, in the same order.
    """

    ids: list[int]
    counts: list[int]
    tokens: bytes
    started: list[SequenceStarted] = []
    finished: list[SequenceFinished] = []
    logprobs: list[TokenLogprobs] = []
    vectors: list[PoolingOutput] = []


class Reject(msgspec.Struct, frozen=True, array_like=True, tag="reject"):
    """replica → gateway: nothing of this Submit ran or will run. At once, or while all of it still waits.

    `retry_after_ms` is for how long one more would wait now, as far as that can be told.
    """

    id: int
    reason: RejectReason
    message: str
    retry_after_ms: int = 0


class ReplicaLoad(msgspec.Struct, frozen=True, array_like=True, tag="load"):
    """replica → anyone, twice a second and when a sequence starts or ends, to a poller only with news: how full it is.

    `counters` only grow within one boot (prefix hit tokens, evictions by cause, preemptions, …). `background` sequences
    run or wait beside the others, which alone are counted in the first three. `blocks` are those of the pool that have
    memory now: it may change. Where layers of several kinds have pools of their own, these, the free and the cached
    ones are of the fullest; `shared_blocks`, which two sequences or more read at this moment, are the prefix tree's.
    `ranks` are those of a model that has several, rank 0 first; `prefill` is of one that takes in handovers.
    `host_tier` and `disk_tier` say how full what lies below the pool is.
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
    ranks: list[RankLoad] = []
    prefill: PrefillLoad | None = None
    host_tier: TierLoad | None = None
    disk_tier: TierLoad | None = None


class PollLoad(msgspec.Struct, frozen=True, array_like=True, tag="poll"):
    """gateway → replica: say your load now, and from now on only what is news to me. A replica that is quiet lives, as
    long as its machine speaks; where that is silent, this asks. Only replicas whose Hello says so know it."""


class SetPlacement(msgspec.Struct, frozen=True, array_like=True, tag="place"):
    """machine → replica: where its weights are to be, MEMORY or DEVICE, and how much of the device it may hold there,
    weights, workspace and KV together. A newer one replaces an older one.

    On the way to MEMORY what runs has `drain_ms` to end; then it is preempted, and goes on when the replica is back.
    Within DEVICE only its KV grows or shrinks. None: as it is.
    """

    residency: Residency
    device_bytes: int | None = None
    drain_ms: int = 0


class PlacementStatus(msgspec.Struct, frozen=True, array_like=True, tag="placed"):
    """replica → whoever sent it a SetPlacement: where it is, each time that a move ended or failed; where it failed
    `problem` says why, and the rest where it is instead. The first answer to the first SetPlacement comes at once, and
    is the only one where that one asks for nothing.

    Bytes of the device are those of each of its devices, where it has several ranks on GPUs.

    device_bytes    it holds now; asleep_bytes of them it holds in MEMORY too (what the driver keeps for a process).
    min_bytes       it needs on the device to serve: weights, workspace, KV of one context.
    max_bytes       it could use: the KV of all sequences that it may run.
    memory_bytes    of host memory it holds: weights, KV, room for handovers; standby_bytes in MEMORY at the most.
    kv_bytes        of device_bytes are KV; kept_bytes of memory_bytes are.
    weights_bytes   its weights take on the device.
    moved_bytes     the move copied, in `seconds`, from the order to its end.
    """

    residency: Residency
    device_bytes: int = 0
    asleep_bytes: int = 0
    min_bytes: int = 0
    max_bytes: int = 0
    memory_bytes: int = 0
    weights_bytes: int = 0
    kv_bytes: int = 0
    kept_bytes: int = 0
    moved_bytes: int = 0
    seconds: float = 0.0
    problem: str = ""
    standby_bytes: int = 0


class ModelDemand(msgspec.Struct, frozen=True, array_like=True, tag="wake"):
    """gateway → machine: how many of its requests for a model wait for a replica, at each change and at least once a
    second while there are any; 0 ends it. The demand of a connection ends with it.

    weight         of the heaviest account among them, as its plan says.
    patience_ms    until the first of them gives up.
    """

    model: str
    requests: int
    weight: float = 1.0
    patience_ms: int = 0


class DrainMachine(msgspec.Struct, frozen=True, array_like=True, tag="drain"):
    """gateway → machine: an operator wants it to take nothing more, or, not `drained`, to take work again. It remembers
    that over its own restarts. Machines that speak a protocol below 3 do not know it."""

    drained: bool


class ReplicaState(msgspec.Struct, frozen=True, array_like=True):
    """One replica as its machine sees it. `boot` changes with every start; `problem` says why it is not serving,
    where it does not just rest.

    toward         where it is moving; equal to `residency` where it is not. A gateway with an open connection may
                   submit while it moves toward DEVICE: it begins as soon as it can.
    ready_ms       until it could serve, as far as the machine can tell, where its model were asked for now; 0 where it
                   serves, −1 where it cannot be: `problem` says why.
    device         index of its first device among the machine's, −1: none yet.
    memory         where its bytes are, as it reported last.
    quarantined    it has died so often that it is not started for a while.
    settings       what settings_digest says of its spec; empty from machines that do not tell.
    leaving        its model was removed, or has other settings now: it is for calls that no other can serve, and ends
                   once it has none.
    devices        indices of all its devices: `memory` says what it holds of each; empty from older machines.
    """

    model: str
    address: str
    residency: Residency
    boot: int
    problem: str = ""
    toward: Residency = Residency.DISK
    ready_ms: int = 0
    device: int = -1
    memory: PlacementStatus | None = None
    quarantined: bool = False
    settings: str = ""
    leaving: bool = False
    devices: list[int] = []
    role: ReplicaRole = ReplicaRole.BOTH


class DeviceState(msgspec.Struct, frozen=True, array_like=True):
    """A GPU, or the memory of a machine without one. `budget_bytes` of its `total_bytes` are for replicas, which
    hold `held_bytes` now."""

    name: str
    total_bytes: int
    budget_bytes: int
    held_bytes: int


class MachineState(msgspec.Struct, frozen=True, array_like=True, tag="fleet"):
    """machine → gateway, on connection and on every change: all replicas of this machine, its devices, and its host
    memory: `memory_bytes` of `memory_budget_bytes` are held by what sleeps or may. `moves` counts by kind, `wake` and
    `sleep`, `start`, `end`, `grow` and `shrink`, and those that failed with `_failed` behind. `problem` says why
    changed settings are not followed. From `protocol` 3 on it comes twice a second, changed or not: whoever hears
    nothing knows that the host is gone. `draining`: it takes nothing more; its calls go on elsewhere. `region`: see
    Hello."""

    machine: str
    replicas: list[ReplicaState]
    devices: list[DeviceState] = []
    memory_bytes: int = 0
    memory_budget_bytes: int = 0
    moves: dict[str, int] = {}
    problem: str = ""
    protocol: int = PROTOCOL_OLDEST
    draining: bool = False
    region: str = ""


Frame = (
    Submit | Cancel | HandOver | HandOverFailed | RaiseEpochs | RouteKey | HeldPrefixes | Hello | StepOutputs | Reject
    | ReplicaLoad | PollLoad | SetPlacement | PlacementStatus | ModelDemand | DrainMachine | MachineState
)  # fmt: skip


class FrameError(ValueError):
    """The peer sent bytes that are no frame of this protocol: the connection must be closed."""


class _Envelope(msgspec.Struct, frozen=True, array_like=True):
    """The beginning of a frame, which is the same in every version of the protocol: an array whose first element is the
    kind; the next of a Hello is the version."""

    kind: str
    first: msgspec.Raw = msgspec.Raw()


_KINDS: Final = frozenset(str(kind.__struct_config__.tag) for kind in get_args(Frame))
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Frame)
_envelopes = msgspec.msgpack.Decoder(_Envelope)


def encode_frame(frame: Frame) -> bytes:
    """The frame's bytes on the wire, its length included."""
    body = _encoder.encode(frame)
    assert len(body) <= FRAME_BYTES_MAX, f"a frame of {len(body)} bytes"
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Cuts a byte stream into frames. Feed it what the socket gave; it gives every whole frame."""

    def __init__(self) -> None:
        self._pending = bytearray()
        self._report: tuple[Frame, ...] = ()  # the last one that peers say again and again,
        self._report_bytes = b""  # and its bytes: all others may be of prompts, and are not kept

    def feed(self, received: bytes) -> Iterable[Frame]:
        """A report that is said again is the same object. Raises FrameError on a length over FRAME_BYTES_MAX, a body
        that is no frame, or one of another protocol."""
        return self._report if self.repeats(received) else self._cut(received)

    def repeats(self, received: bytes) -> bool:
        """Whether this is the last report once more."""
        return received == self._report_bytes and not self._pending

    def _cut(self, received: bytes) -> Iterator[Frame]:
        pending = self._pending
        pending += received
        start = 0
        try:
            while len(pending) - start >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(pending, start)
                if length > FRAME_BYTES_MAX:
                    raise FrameError(f"a frame of {length} bytes is over the limit of {FRAME_BYTES_MAX}")
                begin, end = start + _LENGTH.size, start + _LENGTH.size + length
                if len(pending) < end:
                    break
                body, start = bytes(pending[begin:end]), end
                frame = _decode(body)
                if isinstance(frame, ReplicaLoad | MachineState):
                    self._report, self._report_bytes = (frame,), _LENGTH.pack(length) + body
                yield frame
        finally:
            del pending[:start]


def _decode(body: bytes) -> Frame:
    """The frame of these bytes. A Hello of another version is refused here, for every reader."""
    try:
        frame: Frame = _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FrameError(_foreign(body) or f"a body that is no frame: {error}") from error
    if isinstance(frame, Hello) and not _spoken(frame.protocol, frame.newest_protocol):
        raise FrameError(_mismatch(frame.protocol))
    return frame


def _spoken(oldest: int, newest: int) -> bool:
    """Whether a peer that speaks these versions can be talked to."""
    return oldest <= PROTOCOL_VERSION and max(oldest, newest) >= PROTOCOL_OLDEST


def _foreign(body: bytes) -> str:
    """Why an unreadable body is a frame of another version, in words; empty where it is not."""
    try:
        envelope = _envelopes.decode(body)
        if envelope.kind not in _KINDS:
            return f"a {envelope.kind[:32]!r} frame, which protocol {PROTOCOL_VERSION} does not have: {_ADVICE}"
        if envelope.kind == "hello":
            version = msgspec.msgpack.decode(envelope.first, type=int)
            return "" if _spoken(version, version) else _mismatch(version)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        pass
    return ""


def _mismatch(version: int) -> str:
    spoken = f"{PROTOCOL_OLDEST} to {PROTOCOL_VERSION}"
    return f"a Hello of protocol {version}, and this process speaks protocol {spoken}: {_ADVICE}"
