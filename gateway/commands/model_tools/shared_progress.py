"""How far the hosts of a cluster are with the models of its catalogue, and the wait until they have one."""

import asyncio
import sys
import time
from typing import Any, Final

from msgspec import structs

from gateway.catalogue.mirror import CatalogueMirror, holders, read_mirror
from gateway.catalogue.report import catalogue_reports
from gateway.commands.access.own_host import own_member
from gateway.commands.access.store_access import ask_store
from gateway.commands.terminal.output import format_bytes
from gateway.distribution.settings import status_path
from gateway.distribution.status import FAILED, READY, read_status
from gateway.settings.config import Config, SettingsError
from tenants.records.catalogue import CatalogueModel, HostCatalogue, ModelProgress
from tenants.store.protocol import StoreUnavailable

_WAIT_S: Final = 3600.0
_LOOK_S: Final = 0.5


def host_progress(config: Config) -> dict[str, dict[str, ModelProgress]]:
    """Names of models → names of hosts → how far each is, as the store knows of all hosts, or a machine of itself.
    Raises what the store does."""
    own = own_member(config)
    if not own:
        return {}
    reports: list[HostCatalogue] = []
    if own.startswith("machine/"):
        reports = [each for each in (read_status(status_path(config)),) if each is not None]
    else:
        reports = list(asyncio.run(ask_store(config, lambda access: access.store.cluster.catalogue_reports())))
    found: dict[str, dict[str, ModelProgress]] = {}
    for report in reports:
        for progress in report.models:
            found.setdefault(progress.name, {})[report.member_id.replace("/", " ")] = progress
    return found


def add_hosts(config: Config, documents: list[dict[str, Any]]) -> str:
    """Gives each model of the cluster's catalogue its `hosts`, and adds those whose files this host does not have.
    Returns why it is not known how far other hosts are; empty where it is."""
    try:
        hosts, problem = host_progress(config), ""
    except (StoreUnavailable, SettingsError, OSError) as error:
        hosts, problem = {}, str(error)
    listed = {document["name"] for document in documents}
    absent = [
        model.name
        for model in read_mirror(config.cluster.mirror_path(config.state)).catalogue.models
        if model.name not in listed
    ]
    state = "its files are not here yet"
    documents += [{"name": name, "replicas": [], "problem": "", "live": state} for name in absent]
    for document in documents:
        document["hosts"] = {host: structs.asdict(each) for host, each in hosts.get(document["name"], {}).items()}
    return problem


def hosts_text(document: dict[str, Any]) -> str:
    """`ready on machine m1; machine m2: fetching, 1.2 GB of 3.4 GB`; empty for a model of this host alone."""
    progress = {host: ModelProgress(**each) for host, each in document["hosts"].items()}
    ready = [host for host, each in progress.items() if each.state == READY]
    others = [f"{host}: {progress_text(each)}" for host, each in progress.items() if each.state != READY]
    return "; ".join([*others, *([f"ready on {', '.join(ready)}"] if ready else [])])


def progress_text(progress: ModelProgress) -> str:
    """`fetching, 1.2 GB of 3.4 GB`, `failed: the disk is full`."""
    of = f", {format_bytes(progress.bytes)} of {format_bytes(progress.bytes_total)}"
    counted = of if progress.state != READY and progress.bytes_total else ""
    return f"{progress.state}{counted}{': ' * bool(progress.problem)}{progress.problem}"


def wait_until_shared(config: Config, name: str) -> str:
    """Waits until this host's gateway has the catalogue and every machine that is to hold the model has its files;
    prints what changes on stderr. Returns why that does not become so; empty where it has."""
    began, printed = time.monotonic(), ""
    while (passed_s := time.monotonic() - began) < _WAIT_S:
        mirror = read_mirror(config.cluster.mirror_path(config.state))
        model = next((each for each in mirror.catalogue.models if each.name == name), None)
        gateways = list(catalogue_reports(config))
        served = all((name in gateway.models) is (model is not None) for gateway in gateways)
        states = _states(config, mirror, model)
        if served and all(progress.state == READY for progress in states.values()):
            return ""
        failed = [f"{host}: {progress_text(each)}" for host, each in states.items() if each.state == FAILED]
        if failed and len(failed) == len(states):
            return "; ".join(failed)
        line = "; ".join(f"{host}: {progress_text(each)}" for host, each in states.items()) or "on its way to gateways"
        if line != printed:
            printed = line
            print(f"{name}: {line}, {passed_s:.1f} s", file=sys.stderr, flush=True)
        time.sleep(_LOOK_S)
    return f"not within {_WAIT_S:.0f} s: {printed}"


def _states(config: Config, mirror: CatalogueMirror, model: CatalogueModel | None) -> dict[str, ModelProgress]:
    """How far the machines are that are to hold a model; nothing of one that each host has by itself."""
    if model is None or not model.files:
        return {}
    progress, unknown = host_progress(config).get(model.name, {}), ModelProgress(model.name, "has not heard of it")
    return {f"machine {name}": progress.get(f"machine {name}", unknown) for name in holders(mirror, model)}
