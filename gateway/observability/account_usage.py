"""Usage of each account at this gateway since its start, for the operator's metrics. It knows ids and names of accounts
and names of plans, and nothing of text, users or tokens' names.

The first `max_rows` pairs of account and plan have a row of their own; all later ones are summed by plan.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from gateway.observability.recent_usage import RecentUsage
from tenants.limits.reservation import CallUsage
from tenants.records.accounts import Account

OTHER_ACCOUNTS: Final = "other"
OUTCOME_GROUPS: Final = ("done", "left", "limited", "refused", "failed")
TOKEN_KINDS: Final = ("prompt", "cached", "completion")

# The gateway's outcomes by their cause; an outcome that is missing here is a failure of the gateway.
_ENDING: Final = {
    "done": "done",
    **dict.fromkeys(("client_gone", "cancelled"), "left"),
    **dict.fromkeys(("rate_limit_exceeded", "insufficient_quota"), "limited"),
    **dict.fromkeys(
        ("invalid_request", "context_length_exceeded", "crashes", "invalid_api_key", "account_suspended"),
        "refused",
    ),
}


@dataclass(slots=True)
class AccountUsageRow:
    """The usage of one account, or of a plan's accounts without a row. `refused` is by the name of the limit."""

    outcomes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(OUTCOME_GROUPS, 0))
    tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TOKEN_KINDS, 0))
    refused: Counter[str] = field(default_factory=Counter)
    neurons: float = 0.0


class AccountUsage:
    """Rows by account and plan, only ever growing in count. Adding costs a microsecond or two."""

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        self._rows_used = 0
        self.rows: dict[tuple[str, str], AccountUsageRow] = {}
        self.names: dict[str, str] = {}  # by id, as its last call knew it, of each account that has a row
        self.recent = RecentUsage()

    def finished(self, account: Account, spent: CallUsage, neurons: float) -> None:
        row = self._row(account)
        row.outcomes[_ENDING.get(spent.outcome, "failed")] += 1
        row.tokens["prompt"] += spent.prompt_tokens
        row.tokens["cached"] += spent.cached_tokens
        row.tokens["completion"] += spent.completion_tokens
        row.neurons += neurons
        self.recent.finished(account.id, spent, neurons)

    def refused(self, account: Account, limit: str) -> None:
        self._row(account).refused[limit] += 1
        self.recent.refused(account.id)

    def _row(self, account: Account) -> AccountUsageRow:
        account_id, plan = account.id, account.plan.name
        row = self.rows.get((account_id, plan))
        if row is None:
            if self._rows_used == self._max_rows:
                return self.rows.setdefault((OTHER_ACCOUNTS, plan), AccountUsageRow())
            self._rows_used += 1
            row = self.rows[account_id, plan] = AccountUsageRow()
        self.names[account_id] = account.name
        return row
