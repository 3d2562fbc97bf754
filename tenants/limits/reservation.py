"""The demand, the reservation and the usage of one request, in tokens and neurons. It knows no store and no clock."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
from msgspec import structs

from tenants.limits.caps import LimitStatus, RequestSize
from tenants.records.holds import BUDGETS, DenialReason
from tenants.records.usage import MICRO, UsageRecord

# Micro-neurons of budgets that are used and held, by the subject and the measure of their caps.
Overdrawn = Mapping[tuple[str, DenialReason], int]


class NeuronPrice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Neurons per million tokens, which is micro-neurons per token."""

    input: float = 0.0
    cached_input: float = 0.0
    output: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.cached_input <= self.input <= 1e9 or not 0 <= self.output <= 1e9:
            raise ValueError(f"{self}: prices are 0 to 1e9, and a cached token costs at most what a fresh one does")

    def times(self, factor: float) -> "NeuronPrice":
        return NeuronPrice(self.input * factor, self.cached_input * factor, self.output * factor)

    def micro_neurons(self, prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> int:
        """Rounded up; never falls when a count rises and `cached_tokens` does not."""
        fresh_tokens = max(prompt_tokens - cached_tokens, 0)
        cost = fresh_tokens * self.input + cached_tokens * self.cached_input + completion_tokens * self.output
        return math.ceil(cost)


class QuotaRequest(NamedTuple):
    """The demand of a request: at most `output_tokens`, over all its choices, behind its prompt. `min_output_tokens`
    are enough where its budget has less. `tags` and `metadata`, a JSON object, go into its record."""

    model: str
    price: NeuronPrice
    prompt_tokens: int
    output_tokens: int
    min_output_tokens: int | None = None
    model_class: str = ""
    tags: tuple[str, ...] = ()
    metadata: str = ""

    def size(self) -> RequestSize:
        max_tokens, price = self.output_tokens, self.price
        min_tokens = max_tokens if self.min_output_tokens is None else min(self.min_output_tokens, max_tokens)
        return RequestSize(
            micro_neurons=price.micro_neurons(self.prompt_tokens, 0, max_tokens),
            min_micro_neurons=price.micro_neurons(self.prompt_tokens, 0, min_tokens),
            input_tokens=self.prompt_tokens,
            output_tokens=max_tokens,
        )

    def affordable(self, micro_neurons: int) -> int:
        """How many output tokens so much pays for, behind the whole prompt."""
        if not self.price.output or micro_neurons >= self.size().micro_neurons:
            return self.output_tokens
        tokens = int((micro_neurons - self.prompt_tokens * self.price.input) / self.price.output)
        while self.price.micro_neurons(self.prompt_tokens, 0, tokens) > micro_neurons:
            tokens -= 1  # floating point rounded up
        return tokens


class CallUsage(msgspec.Struct, frozen=True):
    """Usage of a request, so far or in the end, named as in its record. `outcome` is the gateway's word for its end."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    outcome: str = ""
    first_token_ms: float | None = None
    total_ms: float = 0.0


class Reservation(msgspec.Struct, frozen=True):
    """A granted request. `held` micro-neurons are charged to the day of its record until it is settled.

    unused          its record while nothing is used.
    output_tokens   it may generate so many: fewer than it asked for where its budget has no more.
    limits_left     the rest of its limits while it holds these.
    """

    unused: UsageRecord
    price: NeuronPrice
    held: int
    output_tokens: int
    limits_left: tuple[LimitStatus, ...] = ()

    @property
    def key(self) -> tuple[str, str]:
        return self.unused.account_id, self.unused.request_id

    def limits_after(self, spent: CallUsage) -> tuple[LimitStatus, ...]:
        """The rest of its neuron limits once it is settled, if no other call uses them meanwhile."""
        back = (self.held - self._micro_neurons(spent)) / MICRO
        budgets = (left for left in self.limits_left if left.measure in BUDGETS)
        return tuple(left._replace(remaining=max(0.0, min(left.allowed, left.remaining + back))) for left in budgets)

    def neurons(self, spent: CallUsage) -> float:
        """The cost of `spent`, as in the ledger."""
        return self._micro_neurons(spent) / MICRO

    def record(self, spent: CallUsage, outcome: str) -> UsageRecord:
        used: dict[str, Any] = structs.asdict(spent)
        used |= {"outcome": outcome, "micro_neurons": self._micro_neurons(spent)}
        return structs.replace(self.unused, **used)

    def _micro_neurons(self, spent: CallUsage) -> int:
        return self.price.micro_neurons(spent.prompt_tokens, spent.cached_tokens, spent.completion_tokens)
