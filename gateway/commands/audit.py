"""`hearth audit`: who did what, and whether the log of it is whole."""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from msgspec import structs
from tqdm import tqdm

from gateway.commands.output import add_action, add_command, print_json, print_table, read_settings, time_text
from gateway.commands.store_access import StoreAccess, with_store_access
from tenants.audit import SYSTEM, ChainVerdict
from tenants.records.audit_entry import AuditEntry

_TEACHING = """\
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


def add(commands: Any) -> None:
    parser = add_command(commands, "audit", "who did what, and whether the log of it is whole", _TEACHING)
    actions = parser.add_subparsers(dest="action", metavar="list | verify", required=True)
    listing = _of_chain(actions, "list", "entries, the oldest first")
    listing.add_argument("--action", dest="only", metavar="ACTION", help="such as account.change")
    verify = _of_chain(actions, "verify", "walk the log and say where it was altered")
    verify.add_argument("--head", metavar="SEAL", help="that an earlier verify told; it must be in the log")
    parser.set_defaults(run=run)


def _of_chain(actions: Any, name: str, summary: str) -> argparse.ArgumentParser:
    action = add_action(actions, name, summary)
    which = action.add_mutually_exclusive_group()
    which.add_argument("account", nargs="?", default=SYSTEM, help="its id (default: what concerns no one account)")
    which.add_argument("--all", action="store_true", help="of all accounts, and of none")
    return action


def run(options: argparse.Namespace) -> int:
    actions = {"list": _list, "verify": _verify}
    return with_store_access(read_settings(options), lambda tenantry: actions[options.action](tenantry, options))


async def _chains(tenantry: StoreAccess, options: argparse.Namespace) -> list[str]:
    if options.all:
        return [SYSTEM, *(account.id for account in await tenantry.accounts.list())]
    if options.account != SYSTEM:
        await tenantry.accounts.get(options.account)
    return [options.account]


async def _list(tenantry: StoreAccess, options: argparse.Namespace) -> int:
    found = [
        entry
        for chain in await _chains(tenantry, options)
        async for entry in tenantry.audit.entries(chain)
        if options.only in (None, entry.action)
    ]
    if options.json:
        print_json([{**structs.asdict(entry), "detail": _detail(entry.detail)} for entry in found])
        return 0
    rows = [
        (_name(one.account_id), one.seq, time_text(one.at), one.actor, one.action, one.target, one.detail)
        for one in found
    ]
    print_table(("ACCOUNT", "ENTRY", "AT", "ACTOR", "ACTION", "TARGET", "DETAIL"), rows)
    return 0


async def _verify(tenantry: StoreAccess, options: argparse.Namespace) -> int:
    chains = await _chains(tenantry, options)
    if options.head is not None and len(chains) > 1:
        raise ValueError("--head is of one log: name its account instead of --all")
    with _progress() as on_entry:
        verdicts = {chain: await tenantry.audit.verify(chain, options.head, on_entry) for chain in chains}
    if options.json:
        print_json([_verdict_json(chain, one) for chain, one in verdicts.items()])
    else:
        rows = [(_name(chain), one.entries, _in_words(one), one.head or "-") for chain, one in verdicts.items()]
        print_table(("ACCOUNT", "ENTRIES", "VERDICT", "HEAD"), rows)
    return int(any(verdict.problem is not None for verdict in verdicts.values()))


def _verdict_json(chain: str, verdict: ChainVerdict) -> dict[str, Any]:
    broken_at = verdict.seq if verdict.problem is not None else None
    told = {"entries": verdict.entries, "head": verdict.head, "broken_at": broken_at, "problem": verdict.problem}
    return {"account_id": chain, **told}


def _in_words(verdict: ChainVerdict) -> str:
    return "whole" if verdict.problem is None else f"BROKEN at entry {verdict.seq}: {verdict.problem}"


@contextmanager
def _progress() -> Iterator[Callable[[AuditEntry], None]]:
    with tqdm(unit=" entries", file=sys.stderr, disable=not sys.stderr.isatty()) as bar:
        yield lambda entry: bar.update() and None


def _detail(text: str) -> Any:
    """What was written is JSON; what somebody else put there is shown as it is."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _name(chain: str) -> str:
    return chain or "(none)"
