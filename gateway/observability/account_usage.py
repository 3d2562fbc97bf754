"""What each account had of this gateway since its start, for the operator's metrics. It knows ids and plans' names, and
nothing of text, users or tokens' names.

The first `most` pairs of account and plan that are seen have a row of their own; all later ones are summed by plan.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from tenants.limits.reservation import CallUsage

OTHER_ACCOUNTS: Final = "other"
OUTCOME_GROUPS: Final = ("done", "left", "limited", "refused", "failed")
TOKEN_KINDS: Final = ("prompt", "cached", "completion")

# The gateway's outcomes by whose doing they are; one that is not here is a failure of ours.
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
    """One account's, or what is left of a plan's. `refused` by the name of the limit."""

    outcomes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(OUTCOME_GROUPS, 0))
    tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TOKEN_KINDS, 0))
    refused: Counter[str] = field(default_factory=Counter)
    neurons: float = 0.0


class AccountUsage:
    """Rows by account and plan, only ever growing in count. Adding costs a microsecond or two."""

    def __init__(self, most: int) -> None:
        self._max_rows = most
        self._rows_used = 0
        self.rows: dict[tuple[str, str], AccountUsageRow] = {}

    def finished(self, account_id: str, plan: str, spent: CallUsage, neurons: float) -> None:
        share = self._row(account_id, plan)
        share.outcomes[_ENDING.get(spent.outcome, "failed")] += 1
        share.tokens["prompt"] += spent.prompt_tokens
        share.tokens["cached"] += spent.cached_tokens
        share.tokens["completion"] += spent.completion_tokens
        share.neurons += neurons

    def refused(self, account_id: str, plan: str, limit: str) -> None:
        self._row(account_id, plan).refused[limit] += 1

    def _row(self, account_id: str, plan: str) -> AccountUsageRow:
        row = self.rows.get((account_id, plan))
        if row is not None:
            return row
        if self._rows_used < self._max_rows:
            self._rows_used += 1
            row = self.rows[account_id, plan] = AccountUsageRow()
            return row
        return self.rows.setdefault((OTHER_ACCOUNTS, plan), AccountUsageRow())
