"""All operations of the API beside inference, and all other routes: what the OpenAPI document describes.

If two operations match a path the first one counts.
"""

from typing import Final

from gateway.admin import account, accounts, audit, cache, limits, machines, plans, tokens, usage
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
)
ROUTES: Final[tuple[DescribedRoute, ...]] = (*INFERENCE, *CATALOGUE)
