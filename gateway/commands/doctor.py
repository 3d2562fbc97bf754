"""`hearth doctor`: looks at this host and says what it finds, what is wrong, and what to do. It changes nothing."""

import asyncio
import datetime
import enum
import importlib.metadata
import os
import resource
import shutil
import socket
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Final, NamedTuple

from cyclopts import Parameter

from engine.hostinfo import gpus
from engine.hostinfo.memory import HOST_MEMORY_DEVICE, DeviceBudget, available_memory_bytes, device_budgets
from engine.protocol.specs import HOST_MEMORY_SHARE
from gateway.catalogue.catalogue import model_entries
from gateway.catalogue.tasks import EmbeddingSpec
from gateway.commands.model_check import UnservableFolder, inspect_folder
from gateway.commands.model_size import ModelSizes, sizes_of
from gateway.commands.options import Json, SettingsSource, Source, command_app
from gateway.commands.output import format_bytes, print_either
from gateway.commands.residencies import machine_reports, replicas_of, residency_text
from gateway.commands.serve import endpoint_answers
from gateway.commands.standby_fit import SizedModel, exceeding_memory, fit_on_devices
from gateway.config import Config, ModelEntryConfig, ServerConfig, SettingsError, describe
from gateway.http.tls import expiry, open_certificate
from gateway.state_dir import read_credentials
from gateway.text.tokenizer import ModelTokenizer
from tenants.auth.issuers import keys_of
from tenants.open import open_store
from tenants.store.protocol import StoreUnavailable

_TEACHING: Final = """\
examples:
  hearth doctor                                        everything, one line each
  hearth doctor --json                                 for scripts
  hearth doctor --settings                             every setting of hearth.toml, with its default

Exit status: 0 when Hearth can serve here, 1 when something is wrong.
"""
_DISK_BYTES_LOW = 1 << 30
_PYTHON = (3, 11)
_RENEW_DAYS = 14  # before its end, a certificate should have a successor
_FREE_SHARE = 0.9  # of a GPU that nobody uses


class FindingLevel(enum.StrEnum):
    GOOD = "ok"
    NOTE = "note"
    WRONG = "wrong"


class Finding(NamedTuple):
    """One thing that was looked at. `advice` says what to do where it is not good."""

    subject: str
    verdict: FindingLevel
    found: str
    advice: str = ""


app = command_app("doctor", "say what is here and what is wrong", _TEACHING)


@app.default
def doctor(
    *,
    json: Json = False,
    settings: Annotated[bool, Parameter(help="print every setting of hearth.toml and its default")] = False,
    source: Source,
) -> int:
    """Say what is here and what is wrong."""
    if settings:
        print(describe())
        return 0
    findings = list(examine(source))
    print_either(json, [finding._asdict() for finding in findings], lambda: _print(findings))
    return int(any(finding.verdict is FindingLevel.WRONG for finding in findings))


def _print(findings: Sequence[Finding]) -> None:
    for finding in findings:
        print(f"{finding.verdict:6} {finding.subject:8} {finding.found}")
        if finding.advice:
            print(f"{'':15} -> {finding.advice}")


def examine(source: SettingsSource) -> Iterator[Finding]:
    """Every finding; without readable settings there are fewer."""
    yield _python()
    installed = gpus.installed_gpus()
    yield from _engine(installed)
    try:
        config = source.load()
    except SettingsError as error:
        yield Finding(
            "settings", FindingLevel.WRONG, str(error), "correct hearth.toml; `hearth doctor --settings` lists all"
        )
        return
    yield Finding("settings", FindingLevel.GOOD, f"state in {config.state}")
    yield from _store(config)
    yield from _issuers(config)
    usable = gpus.usable_gpus(config.machine.device, installed)
    if usable:
        yield _kernels(config)
    rooms = device_budgets(config.machine.device_bytes, usable)
    yield from _models(config, rooms)
    yield from _memory(config, rooms)
    yield from _machines(config)
    yield _disk(config)
    yield from _certificate(config.server)
    yield from _descriptors(config.server)
    yield _port(config)


def _python() -> Finding:
    found = f"Python {sys.version.split()[0]}, Hearth {importlib.metadata.version('hearth')}"
    if sys.version_info < _PYTHON:
        return Finding("python", FindingLevel.WRONG, found, "install Python 3.11 or newer and run `make serve` again")
    return Finding("python", FindingLevel.GOOD, found)


def _engine(installed: list[gpus.Gpu]) -> Iterator[Finding]:
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        yield Finding("engine", FindingLevel.WRONG, "torch is not installed", "pip install hearth again")
        return
    cuda = gpus.torch_cuda_version()
    yield Finding(
        "engine", FindingLevel.GOOD, f"torch {version}, {f'built for CUDA {cuda}' if cuda else 'without CUDA'}"
    )
    if not installed:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        advice = "" if cores >= 2 else "one core is shared by gateway and model: expect slow answers"
        verdict = FindingLevel.GOOD if cores >= 2 else FindingLevel.NOTE
        yield Finding("gpu", verdict, f"none; models run on {cores} CPU cores", advice)
    elif cuda is None:
        advice = "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu130"
        found = f"{installed[0].name}, but torch was built without CUDA: models run on the CPU"
        yield Finding("gpu", FindingLevel.NOTE, found, advice)
    else:
        yield from map(_gpu, installed)


def _gpu(gpu: gpus.Gpu) -> Finding:
    total, free = format_bytes(gpu.total_bytes), format_bytes(gpu.free_bytes)
    found = f"{gpu.name}, {free} of {total} free, driver {gpu.driver}"
    if gpu.capability < gpus.MIN_CAPABILITY:
        said, least = (".".join(map(str, each)) for each in (gpu.capability, gpus.MIN_CAPABILITY))
        advice = f"its compute capability is {said}, kernels need {least}: with device auto, models run on the CPU"
        return Finding("gpu", FindingLevel.NOTE, found, advice)
    if gpu.free_bytes < _FREE_SHARE * gpu.total_bytes:
        return Finding(
            "gpu", FindingLevel.NOTE, found, "the rest is in use, by Hearth or others: `nvidia-smi` says by whom"
        )
    return Finding("gpu", FindingLevel.GOOD, found)


def _kernels(config: Config) -> Finding:
    """Triton compiles kernels by itself, and with a C compiler the few lines that launch them."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return Finding("kernels", FindingLevel.WRONG, "no C compiler, which Triton needs", "apt install gcc, or set CC")
    headers = Path(sysconfig.get_paths("posix_prefix")["include"])
    if not (headers / "Python.h").exists():
        advice = "apt install python3-dev, or the like"
        return Finding("kernels", FindingLevel.WRONG, f"no Python.h in {headers}, which Triton needs", advice)
    kept = os.environ.get(gpus.KERNEL_CACHE_VARIABLE, str(config.kernels_folder))
    return Finding("kernels", FindingLevel.GOOD, f"compiled with {compiler}, kept in {kept}")


def _store(config: Config) -> Iterator[Finding]:
    url = config.store_url
    shown = url.split("@")[-1]  # without a password

    async def ask() -> list[str]:
        store = open_store(url)
        try:
            await store.ping()
            return list(await store.advice())
        finally:
            await store.close()

    if url.startswith("sqlite:") and not os.path.exists(url.removeprefix("sqlite:")):
        yield Finding("store", FindingLevel.GOOD, f"{shown}: made at the first start")
        return
    try:
        advice = asyncio.run(ask())
    except (StoreUnavailable, ValueError) as error:
        yield Finding("store", FindingLevel.WRONG, f"{shown}: {error}", "start the store, or correct [store] url")
        return
    yield Finding("store", FindingLevel.GOOD, f"{shown} answers")
    for line in advice:
        yield Finding("store", FindingLevel.NOTE, f"{shown} answers, but", line)


def _issuers(config: Config) -> Iterator[Finding]:
    """Their keys are fetched as a gateway fetches them."""
    for issuer in config.issuers:
        place, keys = issuer.jwks_url or issuer.jwks_file, keys_of(issuer)
        asyncio.run(keys.refresh())
        if keys.problem:
            advice = "its JWTs get 503 until a gateway has its keys: see to its server, or correct [[issuers]]"
            yield Finding("issuer", FindingLevel.WRONG, f"{issuer.name}: {place}: {keys.problem}", advice)
        elif not keys.known:
            advice = "its JWTs get 401: correct `algorithm`, or have it publish a key with a `kid`"
            yield Finding(
                "issuer", FindingLevel.WRONG, f"{issuer.name}: {place} has no key for {issuer.algorithm}", advice
            )
        else:
            found = f"{issuer.name}: {len(keys.known)} keys for {issuer.algorithm} at {place}"
            yield Finding("issuer", FindingLevel.GOOD, found)


def _models(config: Config, rooms: list[DeviceBudget]) -> Iterator[Finding]:
    for entry in model_entries(config):
        try:
            found = inspect_folder(config, entry, rooms)
        except UnservableFolder as unserved:
            advice = f"{unserved.advice}; `serve = false` in its [[models]] leaves it out"
            yield Finding("model", FindingLevel.WRONG, f"{entry.name}: {unserved.found}", advice)
            continue
        yield _serves(entry, found.sizes, found.text, found.vectors)


def _serves(entry: ModelEntryConfig, sizes: ModelSizes, text: ModelTokenizer, vectors: EmbeddingSpec | None) -> Finding:
    if vectors is not None:
        gives = f"vectors of {vectors.dimensions} numbers" if vectors.dimensions else "scores"
        found = f"{entry.name}: {format_bytes(sizes.stored_bytes)}, {gives}, texts of {vectors.tokens_max:,} tokens"
        return Finding("model", FindingLevel.GOOD, found)
    chats = "" if text.has_chat_template else ", no chat template: callers must send `prompt`"
    found = f"{entry.name}: {format_bytes(sizes.stored_bytes)}, context {sizes.context_tokens:,}{chats}"
    return Finding("model", FindingLevel.GOOD if text.has_chat_template else FindingLevel.NOTE, found)


def _memory(config: Config, rooms: list[DeviceBudget]) -> Iterator[Finding]:
    """Whether the models can be on the devices together; where not, whether they can take turns."""
    on_gpus = rooms[0].device != HOST_MEMORY_DEVICE
    found_sizes = [(entry, sizes) for entry in model_entries(config) if (sizes := sizes_of(config, entry)) is not None]
    models = [SizedModel(entry, sizes if on_gpus else sizes.on_a_cpu) for entry, sizes in found_sizes]
    pinned, others = [one for one in models if one.entry.pinned], [one for one in models if not one.entry.pinned]
    room, needed = sum(room.budget_bytes for room in rooms), sum(map(_device_bytes, models))
    where = f"{len(rooms)} GPU{'s' * (len(rooms) > 1)}" if on_gpus else "memory"
    found = f"{format_bytes(room)} of {where} for models, which take at least about {format_bytes(needed)}"
    left, largest = fit_on_devices(rooms, pinned), max(others, key=lambda one: one.sizes.memory_bytes, default=None)
    if left is None:
        advice = "pin fewer, set smaller contexts, or use more GPUs: what is pinned makes room for nothing"
        yield Finding("memory", FindingLevel.WRONG, f"{found}; those that are pinned do not fit together", advice)
    elif pinned and largest is not None and largest.sizes.memory_bytes > max(left):
        advice = "pin fewer, or set smaller contexts: it can never be on a device"
        yield Finding(
            "memory", FindingLevel.WRONG, f"{found}; what is pinned leaves none to {largest.entry.name}", advice
        )
    elif fit_on_devices(rooms, models) is not None:
        yield _free(found, needed, rooms)
    else:
        yield Finding("memory", FindingLevel.GOOD, f"{found}: they take turns")
        if on_gpus:
            yield _standby(config, others)


def _device_bytes(model: SizedModel) -> int:
    return model.entry.replicas * model.sizes.memory_bytes


def _free(found: str, needed: int, rooms: list[DeviceBudget]) -> Finding:
    """GPUs have lines of their own for what others use of them."""
    if rooms[0].device == HOST_MEMORY_DEVICE and needed > rooms[0].free_bytes:
        found += f"; {format_bytes(rooms[0].free_bytes)} are free now"
        return Finding("memory", FindingLevel.NOTE, found, "the rest is in use, by Hearth or others")
    return Finding("memory", FindingLevel.GOOD, f"{found}: all at once")


def _standby(config: Config, others: list[SizedModel]) -> Finding:
    """Whether all that is not pinned can sleep in host memory, from where it is back soonest."""
    memory = config.machine.memory_bytes or int(HOST_MEMORY_SHARE * available_memory_bytes())
    needed = sum(model.standby_bytes for model in others)
    found = f"{format_bytes(memory)} of host memory for models that sleep, which take up to {format_bytes(needed)}"
    names = exceeding_memory(memory, others)
    if not names:
        return Finding("standby", FindingLevel.GOOD, found)
    advice = f"raise machine.memory_bytes, or expect {', '.join(names)} to start from disk, which takes seconds"
    return Finding("standby", FindingLevel.NOTE, found, advice)


def _machines(config: Config) -> Iterator[Finding]:
    """Where models are, as the machines that run say; nothing where none does."""
    for fleet in machine_reports(config):
        for device in fleet.devices:
            held = f"{format_bytes(device.held_bytes)} of {format_bytes(device.budget_bytes)} held"
            yield Finding("machine", FindingLevel.GOOD, f"{fleet.machine}: {device.name}, {held}")
        for name in dict.fromkeys(replica.model for replica in fleet.replicas):
            replicas = list(replicas_of(name, [fleet]))
            problem = next((replica.problem for replica in replicas if replica.quarantined), "")
            advice = f"machine.log in {config.state} says more" if problem else ""
            verdict = FindingLevel.WRONG if problem else FindingLevel.GOOD
            found = f"{fleet.machine}: {name}: {residency_text(replicas)}{': ' * bool(problem)}{problem}"
            yield Finding("machine", verdict, found, advice)


def _disk(config: Config) -> Finding:
    place = config.state
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    found = f"{format_bytes(free)} free at {place}"
    if not os.access(place, os.W_OK):
        return Finding("disk", FindingLevel.WRONG, f"{place} cannot be written", "change its owner, or use --state")
    if free < _DISK_BYTES_LOW:
        return Finding("disk", FindingLevel.WRONG, found, "make room: accounts and usage are kept there")
    return Finding("disk", FindingLevel.GOOD, found)


def _certificate(server: ServerConfig) -> Iterator[Finding]:
    """Whether clients will take it, and how long."""
    try:
        if open_certificate(server) is None:
            return
        ends = expiry(server.certificate)
    except SettingsError as error:
        yield Finding("tls", FindingLevel.WRONG, str(error), "correct [server] certificate and key")
        return
    days = (ends - datetime.datetime.now(datetime.UTC)).days
    found = f"{server.certificate} is good until {ends:%Y-%m-%d}, {days} days"
    if days < 0:
        found = f"{server.certificate} has expired on {ends:%Y-%m-%d}"
        yield Finding("tls", FindingLevel.WRONG, found, "put a new one there: it is taken up within a second")
    elif days < _RENEW_DAYS:
        yield Finding("tls", FindingLevel.NOTE, found, "put a new one there in time: it is taken up within a second")
    else:
        yield Finding("tls", FindingLevel.GOOD, found)
    if os.stat(server.key).st_mode & 0o077:
        yield Finding("tls", FindingLevel.NOTE, f"{server.key} can be read by others", f"chmod 600 {server.key}")


def _descriptors(server: ServerConfig) -> Iterator[Finding]:
    """Nothing where there are enough."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and most < server.connections:
        advice = "raise the limit (ulimit -Hn, LimitNOFILE), or set [server] connections lower"
        yield Finding("files", FindingLevel.NOTE, f"{server.connections} connections, but {most} open files", advice)


def _port(config: Config) -> Finding:
    host, port = config.server.host, config.server.port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.create_server((host, port), family=family):
            return Finding("port", FindingLevel.GOOD, f"{host}:{port} is free")
    except OSError as error:
        known = read_credentials(config)
        if (
            known is not None
            and known.base_url.endswith(f":{port}")
            and endpoint_answers(config.server, port, "/healthz")
        ):
            return Finding(
                "port", FindingLevel.GOOD, f"Hearth answers on {host}:{port}; /client/v4/openapi.json says what"
            )
        advice = "another program uses it: start with --port (PORT=)"
        return Finding("port", FindingLevel.WRONG, f"{host}:{port}: {error.strerror}", advice)
