"""`hearth log`: what became of one request, in words, from its lines in the log and its record in the ledger."""

import asyncio
import json as json_codec
import re
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Final

from cyclopts import Parameter
from cyclopts.validators import Number
from msgspec import structs

from engine.log import render
from gateway.commands.access.store_access import StoreAccess, ask_store, require_store
from gateway.commands.terminal.options import Json, Source, command_app
from gateway.commands.terminal.output import fail, format_amount, print_either, progress
from gateway.observability.log_files import LOG_NAMES, log_path, logged_events
from gateway.settings.config import Config, SettingsError
from tenants.auth.errors import NotFound
from tenants.records.accounts import Account
from tenants.records.usage import MICRO, UsageRecord, day_of
from tenants.store.protocol import RETENTION_DAYS, StoreUnavailable

_TEACHING: Final = """\
examples:
  hearth log 7d0c8a8e-3c1f-4c6a-9c53-2f0a4f7e8b11      who asked what model when, how it ended, what it cost
  hearth log 7d0c8a8e-3c1f-4c6a-9c53-2f0a4f7e8b11 --json
  hearth log ID --account acme --days 30               where the log's lines are gone, and the ledger has it

The id of a request is in the header x-request-id of its answer, in its error, and in its line of the log. A request of
a batch is BATCH-PLACE. Lines are read from the files that `hearth serve` keeps, or from [log] file; on a host whose
lines go elsewhere, search there: `journalctl -u hearth | grep ID`. Exit status 1: there is no such request here.
"""
_ID: Final = re.compile(r"[0-9A-Za-z_.:-]{4,200}")
_WAITS: Final = {
    "gateway_ms": "in the gateway",
    "held_ms": "for a replica, or for its model to wake",
    "queue_ms": "in the replica's queue",
}
_ENDINGS: Final = {
    "done": "it was answered",
    "client_gone": "its client left before the end",
    "cancelled": "it was cancelled",
    "timeout": "it took longer than it may",
    "expired": "nobody heard of its end: its gateway died, and it is charged as far as was known",
    "internal": "the gateway failed; the line request_failed says where",
    "rate_limit_exceeded": "a limit by the minute had no room",
    "insufficient_quota": "a budget was used up",
}
app = command_app("log", "what became of one request", _TEACHING)


@app.default
def show(
    request: Annotated[str, Parameter(help="its id, from x-request-id")],
    /,
    *,
    account: Annotated[
        str | None, Parameter(help="whose it is where the log does not say, by name or id (default: all)")
    ] = None,
    days: Annotated[
        int,
        Parameter(validator=Number(gte=1, lte=RETENTION_DAYS), help="how far back to look where it does not say when"),
    ] = 7,
    json: Json = False,
    source: Source,
) -> int:
    """Say what became of one request."""
    if not _ID.fullmatch(request):
        return fail(f"{request[:100]!r} is no id of a request: it is in the header x-request-id of an answer")
    config = source.load()
    events = sorted(_events(config, request), key=lambda event: float(event.get("time", 0)))
    found: tuple[Account | None, UsageRecord | None] = (None, None)
    problem = ""
    try:
        require_store(config)
        found = asyncio.run(ask_store(config, lambda access: _recorded(access, request, account, days, events)))
    except (SettingsError, NotFound, StoreUnavailable, ValueError) as error:
        problem = str(error.args[0] if isinstance(error, NotFound) else error)
        if not events:
            return fail(problem)
    owner, record = found
    if not events and record is None:
        places = ", ".join(dict.fromkeys(str(log_path(config, name)) for name in LOG_NAMES))
        return fail(
            f"there is no request {request} in {places}, nor in the ledger of the last {days} days; --days looks "
            "further back, and other hosts have logs of their own"
        )
    of_record = None if record is None else structs.asdict(record)
    document: dict[str, Any] = {"request": request, "record": of_record, "events": events}
    print_either(json, document, lambda: _print(request, owner, record, events, problem))
    return 0


def _events(config: Config, request: str) -> list[dict[str, Any]]:
    """The events of this request, not those of another whose fields only mention it."""
    return [event for event in logged_events(config, request) if event.get("request") == request]


async def _recorded(
    access: StoreAccess, request: str, named: str | None, days: int, events: Sequence[dict[str, Any]]
) -> tuple[Account | None, UsageRecord | None]:
    """The account that made the request, and the record, if there is one."""
    told = next((str(event["account"]) for event in events if event.get("account")), None)
    today = day_of(int(time.time() * MICRO))
    looked = range(today, today - days, -1)
    if events:
        began = day_of(int(float(events[0]["time"]) * MICRO))
        looked = range(began + 1, began - 3, -1)  # a line is of the end, and a long call began before
    if reference := told or named:
        accounts: Sequence[Account] = [await access.find(reference)]
    elif events:
        return None, None  # nobody's: the credential opened nothing
    else:
        accounts = await access.accounts.list()
    for account in progress(accounts, "accounts"):
        for day in looked:
            if records := await access.store.quotas.records(account.id, day, [request]):
                return account, records[0]
    return (accounts[0] if reference else None), None


def _print(
    request: str, owner: Account | None, record: UsageRecord | None, events: Sequence[dict[str, Any]], problem: str
) -> None:
    """`problem`: why the ledger was not asked."""
    ended: dict[str, Any] = next((event for event in reversed(events) if "outcome" in event or "status" in event), {})
    print(f"request {request}")
    for name, text in _facts(owner, record, ended, problem):
        print(f"  {name:9} {text}")
    if events:
        print("\nits lines:")
        for event in events:
            print(f"  {render({name: value for name, value in event.items() if name != 'request'}, text=True)}")


def _facts(
    owner: Account | None, record: UsageRecord | None, ended: dict[str, Any], problem: str
) -> list[tuple[str, str]]:
    """What is known, in words; what the ledger says goes before what the log does."""
    known = ended if record is None else {**ended, **structs.asdict(record), "token": record.token_id}
    unnamed = f"account {ended['account']}" if ended.get("account") else "nobody: its credential opened nothing"
    who = unnamed if owner is None else f"{owner.name} ({owner.id})"
    facts = [("who", f"{who}, by token {known['token']}" if known.get("token") else who)]
    if known.get("model"):
        facts.append(("model", str(known["model"])))
    began_s = record.started_us / MICRO if record is not None else ended.get("time")
    if began_s:
        facts.append(("when", f"{datetime.fromtimestamp(float(began_s), UTC):%Y-%m-%d %H:%M:%S} UTC"))
    facts.append(("outcome", _outcome(known)))
    if record is not None:
        tokens = f"{record.prompt_tokens:,} of the prompt, {record.cached_tokens:,} of them cached"
        facts.append(("tokens", f"{tokens}; {record.completion_tokens:,} of the answer"))
        facts.append(("cost", f"{format_amount(record.micro_neurons / MICRO)} neurons"))
    else:
        facts.append(("cost", f"not known: {problem}" if problem else "nothing: the ledger has no record of it"))
    facts.append(("time", _times(known)))
    if waits := [f"{known[name]:,.0f} ms {where}" for name, where in _WAITS.items() if known.get(name)]:
        facts.append(("waited", ", ".join(waits)))
    if record is not None and record.tags:
        facts.append(("tags", ", ".join(json_codec.dumps(tag, ensure_ascii=False) for tag in record.tags.split("\n"))))
    return facts


def _outcome(known: dict[str, Any]) -> str:
    outcome = str(known.get("outcome") or known.get("kind") or "unknown")
    text = f"{outcome}: {_ENDINGS[outcome]}" if outcome in _ENDINGS else outcome
    if known.get("status"):
        field = f", because of {known['field']}" if known.get("field") else ""
        text += f" (refused with {known['status']}, code {known.get('code')}{field})"
    return text


def _times(known: dict[str, Any]) -> str:
    total_ms = known.get("total_ms", known.get("ms", 0.0))
    first_ms = known.get("first_token_ms")
    first = "" if first_ms is None else f", its first token after {first_ms:,.0f} ms"
    return f"{total_ms:,.0f} ms{first}"
