"""All operations of the API beside inference, and all other routes: what the OpenAPI document describes.

If two operations match a path the first one counts.
"""

from typing import Final

from gateway.admin import (
    account,
    accounts,
    audit,
    cache,
    limits,
    live_models,
    machines,
    monitoring,
    plans,
    tokens,
    usage,
    usage_by_account,
)
from gateway.admin.catalogue import CATALOGUE
from gateway.admin.inference import INFERENCE, DescribedRoute
from gateway.admin.operation import Operation

OPERATIONS: Final[tuple[Operation, ...]] = (
    *tokens.OPERATIONS,
    *account.OPERATIONS,
    *limits.OPERATIONS,
    *usage.OPERATIONS,
    *audit.OPERATIONS,
    *cache.OPERATIONS,
    *accounts.OPERATIONS,
    *plans.OPERATIONS,
    *machines.OPERATIONS,
    *live_models.OPERATIONS,
    *monitoring.OPERATIONS,
    *usage_by_account.OPERATIONS,
)
ROUTES: Final[tuple[DescribedRoute, ...]] = (*INFERENCE, *CATALOGUE)
