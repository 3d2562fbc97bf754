"""`hearth audit`: who did what, and whether the log of it is whole."""

import json as json_codec
from typing import Annotated, Any, Final

from cyclopts import Parameter
from msgspec import structs

from gateway.commands.access.store_access import Access, StoreAccess
from gateway.commands.terminal.options import Json, command_app, exclusive
from gateway.commands.terminal.output import print_either, print_table, progress_bar, time_text
from tenants.audit import SYSTEM, ChainVerdict

_TEACHING: Final = """\
examples:
  hearth audit list ACCOUNT                            who did what to an account
  hearth audit list ACCOUNT --action token.create
  hearth audit list                                    what concerns no one account, such as plans
  hearth audit verify ACCOUNT                          says whether the log is whole, and its head: keep that
  hearth audit verify ACCOUNT --head SEAL              whole, and not cut off since that head was told
  hearth audit verify --all --json

Each entry is sealed under the server's secret together with the one before it. Exit status of verify: 1 where an entry
was changed, put in or taken out, or where the head is missing.
"""
_NO_ACCOUNT: Final = "(none)"
_WHICH: Final = exclusive()
Account = Annotated[
    str, Parameter(group=("Arguments", _WHICH), help="its name or id (default: what concerns no one account)")
]
All = Annotated[bool, Parameter(name="--all", group=("Parameters", _WHICH), help="of all accounts, and of none")]
app = command_app("audit", "who did what, and whether the log of it is whole", _TEACHING)


async def _chains(access: StoreAccess, account: str, every: bool) -> list[str]:
    if every:
        return [SYSTEM, *(account.id for account in await access.accounts.list())]
    return [account if account == SYSTEM else (await access.find(account)).id]


@app.command(name="list")
async def list_entries(
    account: Account = SYSTEM,
    /,
    *,
    every: All = False,
    action: Annotated[str | None, Parameter(help="such as account.change")] = None,
    json: Json = False,
    access: Access,
) -> None:
    """Entries, the oldest first."""
    entries = [
        entry
        for chain in await _chains(access, account, every)
        async for entry in access.audit.entries(chain)
        if action in (None, entry.action)
    ]
    documents = [{**structs.asdict(entry), "detail": _detail(entry.detail)} for entry in entries]
    names = await access.accounts.names({id for each in entries for id in (each.account_id, each.actor, each.target)})

    def called(id: str) -> str:
        return f"{names[id].name} ({id})" if id in names else id

    rows = [
        (
            called(entry.account_id) or _NO_ACCOUNT, entry.seq, time_text(entry.at), called(entry.actor), entry.action,
            called(entry.target), entry.detail,
        )
        for entry in entries
    ]  # fmt: skip
    heads = ("ACCOUNT", "ENTRY", "AT", "ACTOR", "ACTION", "TARGET", "DETAIL")
    print_either(json, documents, lambda: print_table(heads, rows))


@app.command
async def verify(
    account: Account = SYSTEM,
    /,
    *,
    every: All = False,
    head: Annotated[
        str | None, Parameter(metavar="SEAL", help="that an earlier verify told; it must be in the log")
    ] = None,
    json: Json = False,
    access: Access,
) -> int:
    """Walk the log and say where it was altered."""
    chains = await _chains(access, account, every)
    if head is not None and len(chains) > 1:
        raise ValueError("--head is of one log: name its account instead of --all")
    with progress_bar(unit=" entries") as bar:
        verdicts = {
            chain: await access.audit.verify(chain, head, lambda entry: bar.update() and None) for chain in chains
        }
    documents = [_document(chain, verdict) for chain, verdict in verdicts.items()]
    rows = [
        (chain or _NO_ACCOUNT, verdict.entries, _text(verdict), verdict.head or "-")
        for chain, verdict in verdicts.items()
    ]
    print_either(json, documents, lambda: print_table(("ACCOUNT", "ENTRIES", "VERDICT", "HEAD"), rows))
    return int(any(verdict.problem is not None for verdict in verdicts.values()))


def _document(chain: str, verdict: ChainVerdict) -> dict[str, Any]:
    return {
        "account_id": chain,
        "entries": verdict.entries,
        "head": verdict.head,
        "broken_at": verdict.seq if verdict.problem is not None else None,
        "problem": verdict.problem,
    }


def _text(verdict: ChainVerdict) -> str:
    return "whole" if verdict.problem is None else f"BROKEN at entry {verdict.seq}: {verdict.problem}"


def _detail(text: str) -> Any:
    """What Hearth wrote is JSON; what somebody else put there is shown as it is."""
    try:
        return json_codec.loads(text)
    except ValueError:
        return text
