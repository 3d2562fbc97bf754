"""`hearth doctor`: looks at this host and says what it finds, what is wrong, and what to do. It changes nothing."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Final

from cyclopts import Parameter

from engine.hostinfo import gpus
from engine.hostinfo.memory import device_budgets
from gateway.catalogue.catalogue import model_entries
from gateway.commands.checks import cells, host, models, services
from gateway.commands.checks.cluster_models import cluster_models
from gateway.commands.checks.finding import Finding, FindingLevel, good, wrong
from gateway.commands.terminal.options import Json, SettingsSource, Source, command_app
from gateway.commands.terminal.output import print_either
from gateway.settings.config import SettingsError
from gateway.settings.reference import describe

_TEACHING: Final = """\
examples:
  hearth doctor                                        everything, one line each
  hearth doctor --json                                 for scripts
  hearth doctor --settings                             every setting of hearth.toml, with its default

Exit status: 0 when Hearth can serve here, 1 when something is wrong.
"""
_CORRECT: Final = "correct hearth.toml; `hearth doctor --settings` lists all; a server that runs keeps what it had"
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
    yield host.python()
    installed = gpus.installed_gpus()
    yield from host.engine(installed)
    try:
        config = source.load()
        entries = model_entries(config)
    except SettingsError as error:
        yield wrong("settings", str(error), _CORRECT)
        yield from models.machines(source.load_without_models(), [])  # what runs goes on with what it had
        return
    yield good("settings", f"state in {config.state}")
    yield from services.store(config)
    yield from services.identity(config)
    yield from cells.cells(config)
    yield from services.issuers(config)
    usable = gpus.usable_gpus(config.machine.device, installed)
    if usable:
        yield host.kernels(config)
    yield from host.ranks(config, entries, usable)
    yield from host.fabric(config, entries)
    budgets = device_budgets(config.machine.device_bytes, usable)
    yield from models.models(config, entries, budgets)
    yield from models.memory(config, entries, budgets)
    yield from models.machines(config, entries)
    yield from cluster_models(config)
    yield host.disk(config)
    yield from services.certificate(config.server)
    yield from host.descriptors(config.server)
    yield services.port(config)
