"""An account's record."""

import msgspec

from tenants.records.limits import NO_LIMITS, Limits, overlay, tighter
from tenants.records.plans import DEFAULT_PLAN, Plan
from tenants.records.settings import Settings


class Account(msgspec.Struct, frozen=True):
    """A tenant. `id` is 32 hex characters, times are seconds since 1970.

    ceiling     the operator's limits for this account in place of its plan's.
    own         limits that its administrators lowered.
    epoch       of its prefix caches; raising it hides all that they hold.
    revision    grows with every change, and lets a change that is based on an older one be refused.
    """

    id: str
    name: str
    ceiling: Limits
    created_at: int
    own: Limits = NO_LIMITS
    plan: Plan = DEFAULT_PLAN
    settings: Settings = Settings()
    epoch: int = 0
    suspended_at: int | None = None
    revision: int = 1

    @property
    def ceiling_limits(self) -> Limits:
        """The limits that its administrators may lower, and never raise."""
        return overlay(self.plan.limits, self.ceiling)

    @property
    def limits(self) -> Limits:
        """The limits in force."""
        return tighter(self.ceiling_limits, self.own)
