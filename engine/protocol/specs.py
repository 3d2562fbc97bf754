"""Specifications that processes are started with: a model, a replica, a machine; JSON documents on a command line."""

import hashlib
from typing import Final

import msgspec

# Bytes of a GPU that a machine leaves to its driver and to whatever else needs a little.
DRIVER_RESERVE_BYTES: Final = 1 << 30
HOST_MEMORY_SHARE: Final = 0.7  # of the host memory that is free at a machine's start, for models that sleep


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
    gap_ms: float = 20.0  # the longest step of prompts while others stream (on a GPU), and of several accounts
    sequences: int | None = None  # running at once; None: 64 on a CPU, 512 on a GPU
    waiting: int = 1024  # in the waiting queue at once
    vectors: bool = False  # a decoder gives its prompts' vectors, and no text; its head is not loaded
    scope_floor_blocks: int = 0  # cached blocks that an account keeps while another has more above its own floor
    scope_cap_blocks: int | None = None  # cached blocks that an account keeps unused at most; None: no cap
    weights_bytes: int = 0  # about what its weights take, before a replica has reported it; 0: not known
    pinned: bool = False  # it is on the device for good
    priority: float = 1.0  # its requests count so much beside other models' where there is no room for both
    resident_s: float = 0.2  # after a wake it stays at least so long, even where others wait and it has nothing to do
    wake_s: float = 0.5  # its requests wait so long at most while others run; then those are preempted to make room
    kept_kv_bytes: int = 1 << 30  # of host memory, for the KV of system prompts while it sleeps; 0: none is kept
    host_kv_bytes: int = 0  # of host memory, for KV blocks that the device has no room for; 0: they are lost
    disk_kv_bytes: int = 0  # of disk, for KV blocks that host memory has no room for; 0: they are lost
    disk_kv_folder: str = ""  # where its files are; empty only where it has none
    handover_bytes: int = 0  # of host memory, for KV that other replicas hand over; 0: none is, either way. On a GPU
    # as much of the device beside, but a 32nd of it at most: what comes from GPUs that reach it takes none of the host
    prefill_replicas: int = 0  # so many of a machine's compute prompts for the others; −1: as many as load wants
    gpus: int = 1  # the model is cut into so many ranks, each a process; on a CPU too. 0: as few as hold it
    stages: int = 1  # its layers are shared out to so many stages of `gpus` ranks each. 0: as GPUs' links advise
    public_prefixes: list[list[int]] = []  # token ids, computed at load and cached for good, for everybody to read
    context_kv_bytes: int = 0  # about what the KV of one context takes; 0: not known
    most_ranks: int = 1  # it divides into so many ranks, and into each number that divides that
    layers: int = 0  # and into at most so many stages; 0: not known, as its `hidden` size
    hidden: int = 0


# Fields that the agent alone reads: they change while a replica runs.
_AGENTS_OWN: Final = (
    *("replicas", "weights_bytes", "pinned", "priority", "resident_s", "wake_s", "context_kv_bytes", "most_ranks"),
    *("prefill_replicas", "layers", "hidden"),
)

GPU_OVERHEAD_BYTES: Final = 4 << 30  # of a GPU beside the weights, before a process reports: workspace, graphs, some KV


def estimated_rank_bytes(model: ModelSpec, ranks: int) -> int:
    """Bytes of a GPU that each of so many ranks may need, as long as nothing has reported it."""
    return model.weights_bytes * 9 // 8 // ranks + GPU_OVERHEAD_BYTES


def settings_digest(model: ModelSpec) -> str:
    """A short text that differs where a running replica of one spec cannot be one of the other."""
    defaults = {name: getattr(_DEFAULTS, name) for name in _AGENTS_OWN}
    return hashlib.sha256(msgspec.json.encode(msgspec.structs.replace(model, **defaults))).hexdigest()[:12]


_DEFAULTS: Final = ModelSpec(name="", folder="")


class TelemetrySpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where spans are sent: an OTLP endpoint over HTTP in a region, and the service.name that replicas add `-replica`
    to."""

    otlp_url: str
    service: str = "hearth"
    region: str = ""


class SpecSource(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a machine's spec comes from, which it follows while it runs: once one of these files changed, or what is in
    these folders, the command prints the spec anew as its last line, or why there is none. `seen` is what
    fingerprint of engine/process/files.py said of them before this spec was made."""

    paths: list[str]
    command: list[str]
    seen: str = ""


class MachineSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that `python -m engine.host.agent` needs, as one JSON document."""

    name: str
    address: str  # where gateways connect for MachineState
    folder: str  # sockets, heartbeats and logs of this machine
    models: list[ModelSpec]
    cache: str | None = None  # compiled kernels are kept here from start to start; None: below `folder`
    device: str = "auto"  # auto, cpu, cuda: the GPU with the most room for each replica, or cuda:N for all
    device_bytes: int | None = None  # of each GPU, or of a CPU's memory, for replicas; None: all that is there
    memory_bytes: int | None = None  # of host memory, for models that sleep; None: a share of what is there
    threads: int | None = None  # CPU threads per replica; None: shared evenly
    telemetry: TelemetrySpec | None = None  # None: no traces
    source: SpecSource | None = None  # None: its models stay as they are
    request_s: float = 900.0  # no call lives longer: a replica that is to go has so long for those that it serves
    porter: list[str] | None = None  # a program that lets gateways on other hosts in; None: they are all on this one
    keeper: list[str] | None = None  # a program that fetches the models of this host's cluster; None: it is in none
    region: str = ""  # where this host is, by its certificate; empty: nowhere that has a name
    fabric: str = ""  # the network over which NIXL reaches other hosts' memory; empty: none


class ReplicaSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that `python -m engine.replica.server` needs, as one JSON document."""

    model: ModelSpec
    address: str  # where gateways connect
    pulse: str  # the file of engine/process/heartbeat.py that the machine watches
    boot: int
    device: str = "auto"  # auto, cpu, cuda: the first that the process sees
    device_bytes: int | None = None  # of the device, in all, that it may hold at first; None: all that is free
    standby: bool = False  # it will be sent to sleep: its weights are copied to host memory ahead
    threads: int | None = None
    telemetry: TelemetrySpec | None = None
    region: str = ""  # of the machine
    fabric: str = ""  # of the machine
