"""Plans: what an operator gives many accounts."""

import re
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from tenants.records.limits import NO_LIMITS, Limits

PLAN_NAME: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,31}")


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Limits and scheduling of many accounts; engine.protocol.types.SchedulingTerms has the scheduling fields.

    `wait_s` is how long a request may wait for its turn before it is refused, None: as long as it lives.
    `revision` grows with every change.
    """

    name: str
    limits: Limits = NO_LIMITS
    weight: Annotated[float, Meta(ge=0.01, le=100)] = 1.0
    sequences: Annotated[int, Meta(ge=1, le=100_000)] | None = None
    kv_blocks: Annotated[int, Meta(ge=1, le=100_000_000)] | None = None
    floor_blocks: Annotated[int, Meta(ge=0, le=100_000_000)] | None = None
    cap_blocks: Annotated[int, Meta(ge=0, le=100_000_000)] | None = None
    wait_s: Annotated[float, Meta(gt=0, le=3600)] | None = None
    revision: int = 0

    def __post_init__(self) -> None:
        if not PLAN_NAME.fullmatch(self.name):
            raise ValueError(f"{self.name!r} is no name of a plan; one is like free or team-2")
        if self.floor_blocks is not None and self.cap_blocks is not None and self.floor_blocks > self.cap_blocks:
            raise ValueError(f"floor_blocks {self.floor_blocks} is above cap_blocks {self.cap_blocks}")


# What every account has that was given no other plan, until the operator changes the plan of this name. It lets a
# laptop work all day and still stops a runaway loop: 20 requests a second on average, a minute's worth at once, and
# about 50 million output tokens of a 1 B model a day.
DEFAULT_PLAN: Final = Plan(
    "default", Limits(requests_per_minute=1_200, neurons_per_day=1_000_000.0, concurrent_requests=1_000)
)
