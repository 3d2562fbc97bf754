"""What `hearth top` shows of fixed states, at every width."""

import io
from typing import Any

import msgspec
import pytest
from rich.cells import cell_len
from rich.console import Console

from gateway.admin.machines import DeviceItem, LoadItem, MachineItem, MachineReplicaItem, MachinesItem, RankItem
from gateway.admin.monitoring import TopAccountsItem, TopItem
from gateway.commands.terminal.top_view import MoveRates, TopView

GIB = 1 << 30
LOAD = LoadItem(
    running=4, waiting=2, waiting_tokens=900, blocks=1000, free_blocks=390, cached_blocks=400, shared_blocks=12,
    background=7, draining=False, hit_ratio=0.81, tokens_per_s=312.4, steps=1000,
)  # fmt: skip


def replica(model: str, residency: str, **changes: Any) -> MachineReplicaItem:
    awake = residency == "DEVICE"
    said = MachineReplicaItem(
        model=model, residency=residency, toward=residency, ready_ms=0 if awake else 400, device=0 if awake else None,
        problem="", quarantined=False, weights_bytes=15 * GIB, device_bytes=40 * GIB * awake, kv_bytes=26 * GIB * awake,
        kept_bytes=0, memory_bytes=15 * GIB, waiting_here=0, load=LOAD if awake else None,
    )  # fmt: skip
    return msgspec.structs.replace(said, **changes)


REPLICAS = [
    replica("@cf/acme/asleep", "DISK"),
    replica("@cf/acme/moving", "MEMORY", toward="DEVICE", waiting_here=3),
    replica("@cf/acme/an-assistant-with-a-long-name", "DEVICE"),
    replica(
        "@cf/acme/bad", "DISK", ready_ms=-1, quarantined=True, problem="ended with status 1: \x1b[31mmodel.norm is cut"
    ),
]
MACHINE = MachineItem(
    name="den", address="unix:/run/machine.sock", problem="",
    devices=[DeviceItem("NVIDIA H200", 140 * GIB, 130 * GIB, held * GIB) for held in (97, 0)],
    memory_bytes=45 * GIB, memory_budget_bytes=180 * GIB, moves={"wake": 30, "sleep": 29}, replicas=REPLICAS,
)  # fmt: skip


def shown(
    width: int, *machines: MachineItem, moves: MoveRates | None = None, note: str = "", encoding: str = "utf-8"
) -> str:
    """As plain text; `moves` has seen the machines already."""
    if moves is None:
        moves = MoveRates()
        moves.take(0.0, machines)
    written = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    Console(width=width, color_system=None, file=written).print(TopView(MachinesItem(list(machines)), moves, note))
    written.seek(0)
    return written.read()


def tenants(width: int, *items: TopItem) -> list[str]:
    """The lines of these tenants, below those of the machine."""
    moves = MoveRates()
    moves.take(0.0, [MACHINE])
    view = TopView(MachinesItem([MACHINE]), moves, tenants=TopAccountsItem(60, len(items), list(items)))
    written = io.StringIO()
    Console(width=width, color_system=None, file=written).print(view)
    lines = written.getvalue().splitlines()
    start = next((number for number, line in enumerate(lines) if line.startswith("TENANT")), len(lines))
    return lines[start : start + len(items) + 1]


def tenant(name: str | None, account: str | None = "a" * 32) -> TopItem:
    return TopItem(account, name, "team", 3, 120, 5, 6_000, 1_500, 1_200, 30.0)


def test_each_rank_has_a_line() -> None:
    ranks = [RankItem(0, 0, 1234, 1500, 16 * GIB), RankItem(1, 1, 1233, 100, 17 * GIB)]
    cut = replica("@cf/acme/cut", "DEVICE", load=msgspec.structs.replace(LOAD, ranks=ranks), devices=[0, 1])
    lines = shown(100, msgspec.structs.replace(MACHINE, replicas=[*REPLICAS, cut])).splitlines()
    start = next(number for number, line in enumerate(lines) if line.split()[:2] == ["MODEL", "RANK"])
    assert lines[start].split() == ["MODEL", "RANK", "DEVICE", "HOLDS", "STEPS", "WAITED"]
    assert lines[start + 1].split() == ["@cf/acme/cut", "0", "0", "16.0", "GiB", "1,234", "1.5", "s"]
    assert lines[start + 2].split() == ["@cf/acme/cut", "1", "1", "17.0", "GiB", "1,233", "0.1", "s"]
    assert not any("RANK" in line for line in shown(100, MACHINE).splitlines())


def test_tenants_are_named_with_what_they_use_a_second() -> None:
    heads, first, second, third = tenants(130, tenant("Acme Ltd"), tenant(None), tenant(None, None))
    assert heads.split() == ["TENANT", "PLAN", "RUN", "REQ/MIN", "TOK/S", "PROMPT/S", "HIT", "REFUSED", "NEURONS/MIN"]
    assert first.split() == ["Acme", "Ltd", "team", "3", "120", "20", "100", "25%", "5", "30.0"]
    assert second.split()[0] == "a" * 32
    assert third.startswith("(others)")
    assert tenants(130) == []


@pytest.mark.parametrize("width", [40, 60, 80, 100, 130])
def test_a_tenants_name_is_cut_and_writes_nothing_of_its_own(width: int) -> None:
    lines = tenants(width, tenant("\x1b[31m" + "long " * 40))
    assert len(lines) == 2
    assert max(map(cell_len, lines)) <= width
    assert "\x1b" not in lines[1]
    assert "5" in lines[1].split()


@pytest.mark.parametrize("width", [30, 40, 60, 80, 100, 130, 160])
def test_no_line_is_wider_than_the_terminal_and_no_row_is_broken(width: int) -> None:
    lines = shown(width, MACHINE).splitlines()
    assert max(map(cell_len, lines)) <= width
    heads = [number for number, line in enumerate(lines) if line.startswith("MODEL")]
    rows = lines[heads[0] + 1 : heads[0] + 5]
    assert [row[:4] for row in rows] == ["@cf/"] * 4
    assert "".join(lines[heads[0] + 5 :]).replace(" ", "").endswith("model.normiscut"), (
        "what is wrong is told to its end"
    )


def test_models_are_in_the_order_of_their_residency_and_moves_are_arrows() -> None:
    lines = shown(100, MACHINE).splitlines()
    rows = [line.split() for line in lines[[line[:5] for line in lines].index("MODEL") + 1 :]]
    names = ["an-assistant-with-a-long-name", "moving", "asleep", "bad"]
    assert [row[0] for row in rows[:4]] == [f"@cf/acme/{name}" for name in names]
    assert rows[0][1:] == ["device", "0", "4", "2", "0", "312", "81%", "26.0", "GiB", "20%"]
    assert rows[1][1:] == ["memory", "→", "device", "3"]
    assert rows[3][1:3] == ["disk", "!"]


def test_sums_devices_and_host_memory_are_told() -> None:
    told = shown(100, MACHINE)
    assert told.startswith("1 of 4 replicas on a device, 4 running, 5 waiting, 312 tokens/s\n")
    assert "0 NVIDIA H200 ██████████████████████████████░░░░░░░░░░ 97.0 GiB of 130.0 GiB" in told
    assert "host memory   ██████████░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░ 45.0 GiB of 180.0 GiB" in told


def test_of_several_machines_it_is_said_on_which_one_a_replica_has_a_problem() -> None:
    other = msgspec.structs.replace(MACHINE, name="loft", replicas=REPLICAS[:1])
    assert "@cf/acme/bad on den: ended with status 1" in shown(100, MACHINE, other)
    assert "@cf/acme/bad: ended with status 1" in shown(100, MACHINE)


def test_a_model_with_two_replicas_waits_once_here() -> None:
    twice = msgspec.structs.replace(MACHINE, replicas=[replica("@cf/a/b", "MEMORY", waiting_here=3)] * 2)
    assert " 3 waiting," in shown(100, twice)


def test_what_a_terminal_would_obey_is_not_passed_on() -> None:
    told = shown(160, MACHINE)
    assert "\x1b" not in told
    assert "@cf/acme/bad: ended with status 1: ?[31mmodel.norm is cut" in told


def test_a_terminal_without_unicode_gets_ascii() -> None:
    assert shown(40, MACHINE, encoding="ascii"), "what is cut has no sign that it cannot show"
    told = shown(100, MACHINE, encoding="ascii")
    assert "memory -> device" in told
    assert "####" in told


def test_moves_are_of_the_last_minute_and_a_restart_begins_anew() -> None:
    moves = MoveRates()

    def take(now: float, **counts: int) -> str:
        machine = msgspec.structs.replace(MACHINE, moves=counts)
        moves.take(now, [machine])
        return next(line.strip() for line in shown(100, machine, moves=moves).splitlines() if "moves" in line)

    assert take(0.0, wake=30) == "moves since its start: wake 30"
    assert take(10.0, wake=32, wake_failed=1) == "moves in the last 10 s: wake 2, wake failed 1"
    assert take(65.0, wake=33, wake_failed=1) == "moves in the last 55 s: wake 1"
    assert take(66.0, sleep=1) == "moves since its start: sleep 1"


def test_a_machine_that_is_away_says_so_over_what_it_said_last() -> None:
    away = msgspec.structs.replace(MACHINE, problem="connection refused")
    told = shown(100, away, note="the gateway does not answer")
    assert "connection refused; what it said last:" in told
    assert "the gateway does not answer" in told
    nothing = MachineItem("", "tcp:127.0.0.1:9", "connection refused", [], 0, 0, {}, [])
    assert "tcp:127.0.0.1:9" in shown(60, nothing)
    assert shown(60).startswith("0 of 0 replicas")
