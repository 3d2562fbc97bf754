"""Why a credential or an operation on accounts is refused."""

from collections.abc import Sequence

from tenants.store.protocol import StoreUnavailable


class Unauthenticated(Exception):
    """The credential opens nothing."""


class MalformedToken(Unauthenticated):
    """The text is no ApiToken; it was refused without asking the store."""


class UnknownToken(Unauthenticated):
    """A well-formed ApiToken that was never issued here, is revoked, or has expired; or a JWT that is refused."""


class AccountSuspended(Exception):
    """The credential is good, and its account is suspended by the operator."""


class NotFound(LookupError):
    """There is no account, token or plan of this id."""


class AmbiguousName(ValueError):
    """Several accounts have the name, from before names were unique; the message has their ids."""


class NameInUse(Exception):
    """Another account, `account_id`, has the name. Nothing was changed."""

    def __init__(self, name: str, account_id: str) -> None:
        super().__init__(f"another account has the name {name!r}")
        self.account_id = account_id


class Conflict(Exception):
    """The record was changed since the revision that this change is based on, or is in use. Nothing was changed."""


class HomeUnavailable(StoreUnavailable):
    """The cell that has the account does not answer now, and nothing that it lent has room. `unsure`: it may have heard
    the question."""

    def __init__(self, message: str, *, unsure: bool = True) -> None:
        super().__init__(message, unsure=unsure)


class WrongRegion(Exception):
    """The credential is good, and its account may be served in the `allowed` regions alone, of which `region`, where
    this gateway is, is none. Its home has said nothing more of it."""

    def __init__(self, region: str, allowed: Sequence[str]) -> None:
        super().__init__(f"the account may be served in {', '.join(allowed)} alone, and this is {region or 'nowhere'}")
        self.region = region
        self.allowed = tuple(allowed)
