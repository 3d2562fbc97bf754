"""Why a credential or an operation on accounts is refused."""


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


class Conflict(Exception):
    """The record was changed since the revision that this change is based on, or is in use. Nothing was changed."""
