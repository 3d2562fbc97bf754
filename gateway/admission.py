"""Whether a caller may have what is asked: of new calls, and again of those that run. It knows neither credentials nor
limits.
"""

from collections.abc import Sequence
from datetime import UTC, datetime

from gateway import errors
from gateway.catalogue.catalogue import Model
from gateway.http.exchange import Exchange
from tenants.auth.caller import Caller
from tenants.records.grants import Permission


def check_rights(caller: Caller, exchange: Exchange, account_id: str | None, permissions: Sequence[Permission]) -> None:
    """Raises ApiError where the caller may not send this request; it needs one of the permissions if there are any."""
    if account_id is not None and account_id != caller.account.id:
        raise errors.foreign_account()
    if not caller.grant.reaches(exchange.client.address):
        raise errors.wrong_network()
    if permissions and not any(map(caller.grant.permits, permissions)):
        raise errors.not_permitted(permissions[0])


def check_model(region: str, now: float, caller: Caller, model: Model, name: str) -> None:
    """Raises ApiError where the caller may not have this model, by this name, served in this region now."""
    if not caller.grant.serves(model.name):
        raise errors.model_not_permitted(model.name)
    if model.ends_on is not None and model.ended(datetime.fromtimestamp(now, UTC).date()):
        raise errors.deprecated(name, model.ends_on)
    check_region(region, caller)


def check_region(region: str, caller: Caller) -> None:
    """Raises ApiError where calls of the caller's account may not be served in this region."""
    regions = caller.account.settings.regions
    if regions and region not in regions:
        raise errors.wrong_region(region, regions)
