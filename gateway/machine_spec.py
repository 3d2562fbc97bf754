"""What the settings ask of this host's machine, as its agent takes it. As a program it prints that for an agent that
runs, which reads it anew whenever a file changed: it imports no command line, which would take longer than the rest."""

import sys
from collections.abc import Sequence
from typing import Final

import msgspec

from engine.log import LOG_FORMAT_VARIABLE, LOG_LEVEL_VARIABLE
from engine.process.files import fingerprint
from engine.protocol.specs import MachineSpec, SpecSource, TelemetrySpec
from gateway.catalogue.catalogue import awaits_weights, model_entries, spec_of
from gateway.catalogue.follower import followed_paths
from gateway.distribution.settings import keeper_command, status_path
from gateway.host_region import host_identity
from gateway.identity.host_identity import HostRole
from gateway.porter.settings import PorterSettings, news_path
from gateway.settings.config import Config, SettingsError, load_config

_MODULE: Final = "gateway.machine_spec"  # this one; as a program it is __main__


def machine_environment(config: Config) -> dict[str, str]:
    """What this host's machine has in its environment beside the caller's own."""
    return {LOG_FORMAT_VARIABLE: config.log.format, LOG_LEVEL_VARIABLE: config.log.level}


def machine_command(path: str | None, state: str | None, device: str | None) -> list[str]:
    """The command line of this host's machine; the words are those of --config, --state and --device."""
    spec = msgspec.json.encode(machine_spec(path, state, device)).decode()
    return [sys.executable, "-P", "-m", "engine.host.agent", spec]


def machine_spec(path: str | None, state: str | None, device: str | None) -> MachineSpec:
    """What the settings ask of this host's machine, and how it hears of later ones. Raises SettingsError."""
    paths = followed_paths(load_config(path, state_folder=state, device=device), path)
    seen = fingerprint(paths)  # before it is read: what changes from now on is read again
    config = load_config(path, state_folder=state, device=device)
    command = [sys.executable, "-P", "-m", _MODULE, path or "", state or "", device or ""]
    url, own = config.telemetry.otlp_url, host_identity(config)
    identity = own if own is not None and own.role is HostRole.MACHINE else None
    region = config.server.region if own is None else own.region
    service, collector = config.telemetry.service, config.telemetry.otlp_region or region
    return MachineSpec(
        name=config.machine.name if identity is None else identity.name,
        address=config.machine_address,
        folder=str(config.run_folder),
        models=[spec_of(config, entry) for entry in model_entries(config) if not awaits_weights(config, entry)],
        cache=str(config.kernels_folder),
        device=config.machine.device,
        device_bytes=config.machine.device_bytes,
        memory_bytes=config.machine.memory_bytes,
        threads=config.machine.threads,
        telemetry=None if url is None else TelemetrySpec(otlp_url=url, service=service, region=collector),
        source=SpecSource(paths=paths, command=command, seen=seen),
        request_s=config.server.request_s,
        porter=None if identity is None else _porter_command(config),
        keeper=None if identity is None or config.cluster.own_pki else keeper_command(config),
        region=region,
        fabric=config.machine.fabric,
    )


def _porter_command(config: Config) -> list[str]:
    """The porter of a host that is a machine of a cluster."""
    paths, cluster = config.cluster.paths(config.state), config.cluster
    settings = PorterSettings(
        folder=str(config.run_folder),
        listen=cluster.porter_listen,
        address=cluster.told_address(cluster.porter_listen),
        certificate=str(paths.certificate),
        key=str(paths.key),
        authority=str(paths.authority),
        news=None if cluster.own_pki else str(news_path(config.state)),
        mirror=str(config.cluster.mirror_path(config.state)),
        status=str(status_path(config)),
    )
    return [sys.executable, "-P", "-m", "gateway.porter.porter", msgspec.json.encode(settings).decode()]


def main(words: Sequence[str]) -> int:
    """Prints the spec for a machine that runs: what --config, --state and --device said, empty for what was not."""
    path, state, device = (word or None for word in words)
    try:
        spec = machine_spec(path, state, device)
    except SettingsError as error:
        print(" ".join(str(error).split("\n")))
        return 1
    print(msgspec.json.encode(spec).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
