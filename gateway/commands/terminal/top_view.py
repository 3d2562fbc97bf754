"""The picture of `hearth top`: machines, their devices and models, and the busiest tenants, as one frame for a terminal
of any width. It asks nobody, and its callers tell it the time."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from rich.console import Console, ConsoleOptions, Group, OverflowMethod, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from gateway.admin.machines import DeviceItem, MachineItem, MachineReplicaItem, MachinesItem
from gateway.admin.monitoring import TopAccountsItem, TopItem
from gateway.commands.terminal.output import format_bytes

_MINUTE_S: Final = 60.0
_MIN_BAR, _MAX_BAR = 6, 40
_MIN_NAME: Final = 8
_ORDER: Final = ("DEVICE", "MEMORY", "DISK")
_COLORS: Final = {"DEVICE": "green", "MEMORY": "yellow", "DISK": "dim"}


class MoveRates:
    """How many moves of each kind every machine made in the last minute, from its counters at each frame."""

    def __init__(self) -> None:
        self._samples: dict[str, deque[tuple[float, Mapping[str, int]]]] = {}

    def take(self, now: float, machines: Sequence[MachineItem]) -> None:
        for machine in machines:
            samples = self._samples.setdefault(machine.address, deque())
            if samples and any(machine.moves.get(kind, 0) < count for kind, count in samples[-1][1].items()):
                samples.clear()  # it started again
            samples.append((now, machine.moves))
            while now - samples[0][0] > _MINUTE_S:
                samples.popleft()

    def lately(self, machine: MachineItem) -> tuple[float, dict[str, int]]:
        """(seconds, moves by kind) of the last minute; after a single frame 0 s, and all since the machine's start."""
        samples = self._samples[machine.address]
        (began, first), (ended, last) = samples[0], samples[-1]
        if began == ended:
            return 0.0, dict(last)
        return ended - began, {kind: count - first.get(kind, 0) for kind, count in last.items()}


class ReplicaRow(NamedTuple):
    """A replica with its machine, and how to draw it."""

    machine: MachineItem
    replica: MachineReplicaItem
    ascii_only: bool


class ReplicaColumn(NamedTuple):
    """Shown in terminals of at least `min_width`."""

    head: str
    min_width: int
    cell: Callable[[ReplicaRow], Text | str]
    right: bool = True


class TopView:
    """One picture of all machines and of a gateway's tenants; `note` is a line about the gateway, such as that it is
    away."""

    def __init__(
        self, document: MachinesItem, moves: MoveRates, note: str = "", tenants: TopAccountsItem | None = None
    ) -> None:
        self._machines = document.machines
        self._tenants = tenants
        self._moves = moves
        self._note = note

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        yield _line(_head(self._machines))
        if self._note:
            yield Text(_plain(self._note), style="bold red")
        for machine in self._machines:
            yield Text()
            yield self._machine(machine, width, options.ascii_only)
        rows = [
            ReplicaRow(machine, replica, options.ascii_only)
            for machine in self._machines
            for replica in machine.replicas
        ]
        if rows:
            yield Text()
            yield _models(sorted(rows, key=_place), options)
        if ranked := [row for row in rows if row.replica.load is not None and row.replica.load.ranks]:
            yield Text()
            yield _ranks(ranked, options)
        if self._tenants is not None and self._tenants.accounts:
            yield Text()
            yield _tenants(self._tenants, options)
        for machine, replica, _ in rows:
            if replica.problem:  # whole, on as many lines as it takes: the reason ends it
                where = f"{replica.model} on {machine.name}" if len(self._machines) > 1 else replica.model
                yield Text(_plain(f"{where}: {replica.problem}"), "red" if replica.quarantined else "yellow")

    def _machine(self, machine: MachineItem, width: int, ascii_only: bool) -> RenderableType:
        name = f"{machine.name} at {machine.address}" if machine.name else machine.address
        lines: list[RenderableType] = [_line(name, "bold")]
        if machine.problem:
            lines.append(_line(f"  {machine.problem}; what it said last:", "red"))
        if machine.draining:
            lines.append(_line("  drained: it takes nothing more; `hearth machines undrain` ends that", "yellow"))
        devices = [(f"{number} {device.name}", device) for number, device in enumerate(machine.devices)]
        if budget := machine.memory_budget_bytes:
            devices.append(("host memory", DeviceItem("", budget, budget, machine.memory_bytes)))
        if devices:
            lines.append(_devices(devices, width, ascii_only))
        lines.append(_moves_line(*self._moves.lately(machine)))
        return Group(*lines)


def _head(machines: Sequence[MachineItem]) -> str:
    replicas = [replica for machine in machines for replica in machine.replicas]
    loads = [replica.load for replica in replicas if replica.load is not None]
    here = {replica.model: replica.waiting_here for replica in replicas}  # of the gateway, the same for each replica
    waiting = sum(load.waiting for load in loads) + sum(here.values())
    rate = sum(load.tokens_per_s for load in loads)
    on_device = sum(replica.residency == "DEVICE" for replica in replicas)
    models = f"{on_device} of {len(replicas)} replicas on a device"
    return f"{models}, {sum(load.running for load in loads)} running, {waiting} waiting, {rate:,.0f} tokens/s"


def _devices(devices: list[tuple[str, DeviceItem]], width: int, ascii_only: bool) -> Table:
    table = Table.grid(padding=(0, 1))
    table.add_column(no_wrap=True, overflow="crop" if ascii_only else "ellipsis", ratio=1)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, justify="right")
    bar = min(_MAX_BAR, width - 50)
    for name, device in devices:
        share = device.held_bytes / max(1, device.budget_bytes)
        text = f"{format_bytes(device.held_bytes)} of {format_bytes(device.budget_bytes)}"
        table.add_row(f"  {_plain(name)}", _bar(share, bar, ascii_only) if bar >= _MIN_BAR else "", text)
    return table


def _moves_line(seconds: float, counts: Mapping[str, int]) -> Text:
    """The moves of a time; after a single frame, all since the machine's start."""
    when = f"in the last {seconds:.0f} s" if seconds else "since its start"
    moves = ", ".join(f"{kind.replace('_', ' ')} {count}" for kind, count in sorted(counts.items()) if count)
    failed = any(count for kind, count in counts.items() if kind.endswith("_failed"))
    return _line(f"  moves {when}: {moves or 'none'}", "red" if failed else "dim")


def _models(rows: Sequence[ReplicaRow], options: ConsoleOptions) -> Table:
    """The table of models."""
    columns = [column for column in _COLUMNS if options.max_width >= column.min_width]
    cells = [[_as_text(column.cell(row)) for row in rows] for column in columns]
    return _table([(column.head, column.right) for column in columns], cells, options)


def _table(heads: Sequence[tuple[str, bool]], columns: Sequence[Sequence[Text]], options: ConsoleOptions) -> Table:
    """Columns under their heads, which say whether they are at the right. Only the first, of names, is cut where the
    terminal is too narrow; one without Unicode has no sign for that."""
    overflow: OverflowMethod = "crop" if options.ascii_only else "ellipsis"
    cells = [[Text(head, style="bold"), *column] for (head, _), column in zip(heads, columns, strict=True)]
    names, *others = [max(cell.cell_len for cell in below) for below in cells]
    left = options.max_width - sum(others) - len(others)
    table = Table.grid(padding=(0, 1, 0, 0), pad_edge=False)
    for (_, right), cut in zip(heads, [min(names, max(_MIN_NAME, left)), *others], strict=True):
        table.add_column(justify="right" if right else "left", no_wrap=True, overflow=overflow, width=cut)
    for line in zip(*cells, strict=True):
        table.add_row(*line)
    return table


def _ranks(rows: Sequence[ReplicaRow], options: ConsoleOptions) -> Table:
    """A line for each rank of the models that have several."""
    ranks = [(row, rank) for row in rows if row.replica.load is not None for rank in row.replica.load.ranks]
    columns = [
        ("MODEL", False, [_plain(row.replica.model) for row, _ in ranks]),
        ("RANK", True, [str(rank.rank) for _, rank in ranks]),
        ("DEVICE", True, ["" if rank.device is None else str(rank.device) for _, rank in ranks]),
        ("HOLDS", True, [format_bytes(rank.device_bytes) for _, rank in ranks]),
        ("STEPS", True, [f"{rank.steps:,}" for _, rank in ranks]),
        ("WAITED", True, [f"{rank.waited_ms / 1000:.1f} s" for _, rank in ranks]),
    ]
    return _table(
        [column[:2] for column in columns], [[Text(cell) for cell in column[2]] for column in columns], options
    )


def _tenants(document: TopAccountsItem, options: ConsoleOptions) -> Table:
    """The busiest tenants at this gateway, as many as it told of, and what they used in its last seconds."""
    columns = [column for column in _TENANT_COLUMNS if options.max_width >= column.min_width]
    cells = [[Text(_plain(column.cell(item, document.seconds))) for item in document.accounts] for column in columns]
    return _table([(column.head, column.right) for column in columns], cells, options)


class TenantColumn(NamedTuple):
    """Shown in terminals of at least `min_width`; the cell is of a tenant and of how many seconds were summed."""

    head: str
    min_width: int
    cell: Callable[[TopItem, int], str]
    right: bool = True


_TENANT_COLUMNS: Final = (
    TenantColumn("TENANT", 0, lambda item, _: item.name or item.account or "(others)", right=False),
    TenantColumn("PLAN", 60, lambda item, _: item.plan or "", right=False),
    TenantColumn("RUN", 0, lambda item, _: str(item.running)),
    TenantColumn("REQ/MIN", 0, lambda item, s: f"{60 * item.requests / s:,.0f}"),
    TenantColumn("TOK/S", 0, lambda item, s: f"{item.completion_tokens / s:,.0f}"),
    TenantColumn("PROMPT/S", 70, lambda item, s: f"{item.prompt_tokens / s:,.0f}"),
    TenantColumn("HIT", 80, lambda item, _: f"{item.cached_tokens / (item.prompt_tokens or 1):.0%}"),
    TenantColumn("REFUSED", 0, lambda item, _: str(item.refused) if item.refused else ""),
    TenantColumn("NEURONS/MIN", 90, lambda item, s: f"{60 * item.neurons / s:,.1f}"),
)


def _as_text(cell: Text | str) -> Text:
    return cell if isinstance(cell, Text) else Text(cell)


def _place(row: ReplicaRow) -> tuple[int, str, str]:
    return _ORDER.index(row.replica.residency), row.replica.model, row.machine.name


def _where(row: ReplicaRow) -> Text:
    replica = row.replica
    where = Text(replica.residency.lower(), style=_COLORS[replica.residency])
    if replica.device is not None and replica.residency == "DEVICE" and len(row.machine.devices) > 1:
        where.append(f" {'+'.join(map(str, replica.devices or [replica.device]))}")
    if replica.toward != replica.residency:
        where.append(" -> " if row.ascii_only else " → ", style="bold")
        where.append(replica.toward.lower(), style=_COLORS[replica.toward])
    if replica.quarantined:
        where.append(" !", style="bold red")
    return where


def _ready(row: ReplicaRow) -> str:
    ready_ms = row.replica.ready_ms
    if ready_ms < 0:
        return "never"
    return f"{ready_ms / 1000:.1f} s" if ready_ms else "now"


def _kv_share(row: ReplicaRow) -> str:
    """The share of its device's budget that its KV takes; of several ranks, those of the first."""
    replica = row.replica
    if not replica.kv_bytes or replica.device is None or replica.device >= len(row.machine.devices):
        return ""
    return f"{replica.kv_bytes / max(1, row.machine.devices[replica.device].budget_bytes):.0%}"


def _used(row: ReplicaRow) -> Text:
    """A bar of the KV blocks in use."""
    load = row.replica.load
    return Text() if load is None or not load.blocks else _bar(1 - load.free_blocks / load.blocks, 8, row.ascii_only)


def _of_load(text_of: Callable[..., str]) -> Callable[[ReplicaRow], str]:
    return lambda row: "" if row.replica.load is None else text_of(row.replica.load)


_COLUMNS: Final = (
    ReplicaColumn("MODEL", 0, lambda row: _plain(row.replica.model), right=False),
    ReplicaColumn("MACHINE", 150, lambda row: _plain(row.machine.name), right=False),
    ReplicaColumn("WHERE", 0, _where, right=False),
    ReplicaColumn("ROLE", 120, lambda row: "" if row.replica.role == "BOTH" else row.replica.role.lower(), right=False),
    ReplicaColumn("READY IN", 110, _ready),
    ReplicaColumn("RUN", 36, _of_load(lambda load: f"{load.running}")),
    ReplicaColumn("WAIT", 36, _of_load(lambda load: f"{load.waiting}")),
    ReplicaColumn("HERE", 70, lambda row: f"{row.replica.waiting_here}"),
    ReplicaColumn("TOK/S", 36, _of_load(lambda load: f"{load.tokens_per_s:,.0f}")),
    ReplicaColumn("HIT", 80, _of_load(lambda load: "" if load.hit_ratio is None else f"{load.hit_ratio:.0%}")),
    ReplicaColumn("HOST", 85, _of_load(lambda load: f"{load.host_hit_ratio:.0%}" if load.host_hit_ratio else "")),
    ReplicaColumn("DISK", 115, _of_load(lambda load: f"{load.disk_hit_ratio:.0%}" if load.disk_hit_ratio else "")),
    ReplicaColumn("KV", 90, lambda row: format_bytes(row.replica.kv_bytes) if row.replica.kv_bytes else ""),
    ReplicaColumn("SHARE", 100, _kv_share),
    ReplicaColumn("IN USE", 120, _used),
    ReplicaColumn(
        "WEIGHTS", 130, lambda row: format_bytes(row.replica.weights_bytes) if row.replica.weights_bytes else ""
    ),
    ReplicaColumn("QUEUED", 140, _of_load(lambda load: f"{load.background}")),
)


def _bar(share: float, width: int, ascii_only: bool) -> Text:
    full, empty = ("#", "-") if ascii_only else ("█", "░")
    filled = round(min(max(share, 0.0), 1.0) * width)
    return Text(full * filled + empty * (width - filled), style="red" if share > 0.97 else "cyan")


def _line(text: str, style: str = "") -> Text:
    return Text(_plain(text), style=style, no_wrap=True, overflow="crop")


def _plain(text: str) -> str:
    """Without what would move a terminal's cursor: names and problems come from elsewhere."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)
