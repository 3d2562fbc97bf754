"""The models of a cluster: which host does not get one, and where this host serves another than the others do."""

from collections.abc import Iterator
from typing import Final

from gateway.catalogue.mirror import read_mirror
from gateway.commands.checks.finding import Finding, note, wrong
from gateway.commands.model_tools.shared import shares_models
from gateway.commands.model_tools.shared_progress import host_progress, progress_text
from gateway.distribution.status import FAILED
from gateway.settings.config import CONFIG_NAME, Config, SettingsError
from tenants.store.protocol import StoreUnavailable

_TRIES: Final = "it tries again by itself; `hearth models list` shows how far each host is"


def cluster_models(config: Config) -> Iterator[Finding]:
    """How far the hosts of this host's cluster are with its models; nothing on a host of none."""
    if not shares_models(config):
        return
    try:
        progress = host_progress(config)
    except (StoreUnavailable, SettingsError, OSError) as error:
        yield note("models", f"how far other hosts are is not known: {error}", "the models that were known last stay")
        return
    for name, hosts in progress.items():
        for host, each in hosts.items():
            if each.state == FAILED:
                yield wrong("models", f"{host} does not get {name}: {each.problem}", _TRIES)
            elif each.problem:
                yield note("models", f"{host} waits for {name}: {progress_text(each)}", _TRIES)
    for entry in config.models:
        if any(
            model.name == entry.name for model in read_mirror(config.cluster.mirror_path(config.state)).catalogue.models
        ):
            text = f"{entry.name} is a model of the cluster, and has a [[models]] in {CONFIG_NAME} of this host"
            yield note("models", text, "here that one counts; take it out to follow the cluster")
