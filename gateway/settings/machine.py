"""[machine] of hearth.toml. It reads no file."""

from typing import Annotated

import msgspec
from msgspec import Meta

from gateway.settings.doc import doc

DEVICE_PATTERN = "^(auto|cpu|cuda|cuda:[0-9]{1,2})$"
_Positive = Annotated[int, Meta(ge=1)]
_Fabric = Annotated[str, Meta(pattern="^([a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?)?$")]


class MachineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[machine]: this host's engine, and the machines that the gateway talks to."""

    name: Annotated[str, doc("name of this machine in logs", pattern="^[A-Za-z0-9._-]{1,64}$")] = "local"
    address: Annotated[str | None, doc("unix:PATH or tcp:127.0.0.1:PORT to listen on; default in state_folder")] = None
    addresses: Annotated[list[str], doc("machines the gateway connects to; empty: this one", max_length=1024)] = []
    folder: Annotated[str | None, doc("folder of sockets, pulses and logs; default below state_folder")] = None
    device: Annotated[
        str, doc("auto, cpu, cuda (all GPUs of this host) or cuda:N (that one for all)", pattern=DEVICE_PATTERN)
    ] = "auto"
    threads: Annotated[_Positive | None, doc("CPU threads per replica; default: shared evenly")] = None
    device_bytes: Annotated[
        _Positive | None,
        doc("memory of each GPU, or of the CPU's, that replicas share; default: all that is there"),
    ] = None
    memory_bytes: Annotated[
        _Positive | None, doc("host memory for models that sleep; default: 70 % of what is free at the start")
    ] = None
    kv_folder: Annotated[
        str | None, doc("folder on a fast disk for models' disk_kv_bytes; default below state_folder")
    ] = None
    fabric: Annotated[_Fabric, doc("like rack-1; hosts of one write KV by NIXL, unencrypted")] = ""
