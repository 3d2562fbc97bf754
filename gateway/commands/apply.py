"""`hearth apply`: plans, accounts, limits and tokens as a file declares them."""

import contextlib
import json as json_codec
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, TextIO

from cyclopts import Parameter
from msgspec import structs

from gateway.commands.access.store_access import StoreAccess, store_exists, with_store_access
from gateway.commands.account_tools.teams_file import InvalidTeams, read_teams
from gateway.commands.account_tools.teams_plan import Change, TeamsPlanner
from gateway.commands.terminal.confirm import Yes, confirm
from gateway.commands.terminal.options import Duration, Json, Source, command_app, exclusive
from gateway.commands.terminal.output import fail, print_either
from tenants import deletion
from tenants.records.accounts import Account
from tenants.records.tokens import ApiToken
from tenants.store.settings import StoreConfig

_TEACHING: Final = """\
examples:
  hearth apply teams.yaml --dry-run                    what would change, and nothing else
  hearth apply teams.yaml                              asks where somebody may do less afterwards
  hearth apply teams.yaml --yes --tokens-to new.jsonl     new tokens' secrets, for you alone
  hearth apply teams.yaml --prune                      what the file does not name ends: accounts after a grace

teams.yaml (or .toml):
  plans:
    team: {weight: 4, limits: {requests_per_minute: 600, neurons_per_month: 5e6}}
  accounts:
    acme:
      plan: team
      limits: {requests_per_minute: 900}               # in place of its plan's
      settings: {zero_retention: true}
      tokens:
        ci: {permissions: [inference], models: ["@cf/*"], expires: 2030-01-31}

The whole file is checked against the store before anything is written; a second run changes nothing. What is not named
stays as it is: a limit that is left out of `limits` is none, a field that is left out of an account stays. `id` beside
`plan` names an account by its id, and gives it the name in the file.
"""
_SECRETS: Final = exclusive()
app = command_app("apply", "plans, accounts, limits and tokens as a file declares them", _TEACHING)


@app.default
def apply(
    file: Annotated[Path, Parameter(help="teams.yaml, or .toml")],
    /,
    *,
    dry_run: Annotated[bool, Parameter(help="say what would change, and change nothing")] = False,
    prune: Annotated[bool, Parameter(help="also end what the file does not name")] = False,
    grace: Annotated[Duration, Parameter(metavar="7d", help="in which pruned accounts can be restored")] = (
        deletion.GRACE_S
    ),
    tokens_to: Annotated[
        Path | None, Parameter(group=("Parameters", _SECRETS), help="a new file for new tokens (default: FILE.tokens)")
    ] = None,
    print_tokens: Annotated[bool, Parameter(group=("Parameters", _SECRETS), help="print new tokens instead")] = False,
    yes: Yes = False,
    json: Json = False,
    source: Source,
) -> int:
    """Make the store as a file declares it."""
    config = source.load()
    try:
        teams = read_teams(file)
    except InvalidTeams as error:
        return fail(str(error))
    except OSError as error:
        return fail(f"{file} cannot be read: {error.strerror}; `hearth apply --help` shows what such a file says")
    secrets = NewSecrets(None if print_tokens else tokens_to or file.with_name(f"{file.name}.tokens"))

    async def apply_to(access: StoreAccess) -> None:
        planner = TeamsPlanner(access, teams, secrets.keep, grace)
        changes = await planner.changes(prune)
        document: dict[str, Any] = {"dry_run": dry_run, "changes": [change.text for change in changes]}
        if dry_run or not changes:
            return print_either(json, document, lambda: _print(changes))
        if not json:
            _print(changes)
        if losses := [change.text for change in changes if change.loses]:
            confirm(f"{len(losses)} of these changes take something away: {'; '.join(losses)}", yes)
        with secrets.open(planner.new_tokens):
            for change in changes:
                await change.act()
        print_either(json, {**document, **secrets.document()}, lambda: _print_done(changes, secrets))

    async def check(access: StoreAccess) -> None:
        await TeamsPlanner(access, teams, secrets.keep, grace).changes(prune)

    if not store_exists(config):
        with tempfile.TemporaryDirectory() as folder:  # compared with an empty store, so that a mistake makes none
            empty = structs.replace(config, state_folder=folder, store=StoreConfig())
            status = with_store_access(empty, apply_to if dry_run else check, makes=True)
        if dry_run or status:
            return status
    return with_store_access(config, apply_to, makes=True)


class NewSecrets:
    """The texts of new tokens: line by line into a new file for this user alone, or kept to be printed."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.kept: list[dict[str, str]] = []
        self._file: TextIO | None = None

    @contextlib.contextmanager
    def open(self, count: int) -> Iterator[None]:
        """Makes the file if there will be some. Raises FileExistsError."""
        if self.path is None or not count:
            yield
            return
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as self._file:
            yield

    def keep(self, account: Account, token: ApiToken, text: str) -> None:
        names = {"account": account.name, "account_id": account.id, "name": token.name, "token_id": token.id}
        self.kept.append({**names, "token": text})
        if self._file is not None:
            self._file.write(json_codec.dumps(self.kept[-1]) + "\n")
            self._file.flush()

    def document(self) -> dict[str, Any]:
        if self.path is None:
            return {"tokens": self.kept}
        return {"tokens_file": str(self.path)} if self.kept else {}


def _print(changes: Sequence[Change]) -> None:
    for change in changes:
        print(change.text)
    if not changes:
        print("nothing to change: all is as the file says")


def _print_done(changes: Sequence[Change], secrets: NewSecrets) -> None:
    print(f"\n{len(changes)} changes made")
    if not secrets.kept:
        return
    if secrets.path is not None:
        print(f"The new tokens are in {secrets.path}, which you alone can read: keep them, and remove the file.")
        return
    for secret in secrets.kept:
        print(f"{secret['account']}/{secret['name']}  {secret['token']}")
    print("The tokens are shown this once: keep them.")
