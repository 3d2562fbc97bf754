"""Specifications that processes are started with: a model, a replica, a machine; JSON documents on a command line."""

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
    public_prefixes: list[list[int]] = []  # token ids, computed at load and cached for good, for everybody to read


class TelemetrySpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where spans are sent: an OTLP endpoint over HTTP, and the service.name that replicas add `-replica` to."""

    otlp_url: str
    service: str = "hearth"


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
