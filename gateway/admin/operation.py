"""One operation of the API: its path, who may use it, what it takes and what it answers. It serves nothing."""

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field
from datetime import UTC, datetime
from typing import Annotated, Any, Final, Generic, Literal, TypeVar, get_args, get_type_hints

import msgspec
from msgspec import Meta

from gateway.cluster.fleet import ReplicaFleet
from gateway.errors import bad_input
from gateway.http.idempotency import IdempotencyStore
from gateway.listing.pages import PageItem
from gateway.observability.alerts import AlertWatch
from gateway.observability.metrics import Metrics
from gateway.observability.store_health import StoreHealth
from gateway.settings.server import ServerConfig
from gateway.text.encoding_cache import EncodingCache
from tenants.audit import AuditLog, fit_detail
from tenants.auth.accounts import NAME_MAX, AccountService
from tenants.auth.caller import Caller
from tenants.limits.quota import Quota
from tenants.records.grants import Permission
from tenants.store.protocol import Store

BASE: Final = "/client/v4"
OPERATOR: Final = f"{BASE}/operator"
ACCOUNT: Final = f"{BASE}/accounts/{{account_id}}"
FOR_OPERATOR: Final = (Permission.OPERATOR,)
FOR_ADMIN: Final = (Permission.ACCOUNT_ADMIN,)
FOR_READER: Final = (Permission.ACCOUNT_ADMIN, Permission.USAGE_READ)
# What a path's parameters may be; an account's id is checked later, since it has an error of its own.
PATH_PARAMETERS: Final = {
    "account_id": re.compile("[^/]+"),
    "token_id": re.compile("[0-9A-Za-z]{1,32}"),
    "plan": re.compile("[a-z0-9][a-z0-9._-]{0,31}"),
    "machine": re.compile(".{1,512}"),
}

Q = TypeVar("Q", bound=msgspec.Struct)
B = TypeVar("B")
R = TypeVar("R")
Time = Annotated[datetime, Meta(tz=True)]
Name = Annotated[str, Meta(min_length=1, max_length=NAME_MAX)]


class NoFields(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The query or the body of an operation without any."""


class CursorItem(msgspec.Struct, frozen=True):
    """`cursor` asks for what follows; null at the end."""

    count: int
    per_page: int
    cursor: int | None


class ResponseInfo(msgspec.Struct, frozen=True):
    code: int
    message: str
    type: None = None


@dataclass(frozen=True, slots=True)
class AdminRequest(Generic[Q, B]):
    """A request of a permitted caller. `names` are the path's parameters; `account_id` is "" if it has none.

    `revision` is the one that a change must be based on, from `If-Match`; None without that header.
    """

    caller: Caller
    names: dict[str, str]
    query: Q
    body: B
    revision: int | None

    @property
    def account_id(self) -> str:
        return self.names.get("account_id", "")


@dataclass(frozen=True, slots=True)
class AdminResult(Generic[R]):
    """`revision` becomes the ETag. `csv` is sent in place of everything else."""

    result: R
    revision: int | None = None
    page: PageItem | CursorItem | None = None
    messages: tuple[ResponseInfo, ...] = ()
    csv: str | None = None


@dataclass(frozen=True, slots=True)
class AdminContext:
    """The parts that operations work with; built once. `open_requests` counts the inference requests in progress here,
    `running` those of each account; `store_kind` is sqlite or redis, `notice_key` gives the key that signs an account's
    notices, `calendar` the seconds since 1970."""

    limits: ServerConfig
    store: Store
    accounts: AccountService
    quota: Quota
    fleet: ReplicaFleet
    store_health: StoreHealth
    encodings: EncodingCache
    audit: AuditLog
    idempotency: IdempotencyStore
    notice_key: Callable[[str], bytes]
    open_requests: Callable[[], int]
    calendar: Callable[[], float]
    metrics: Metrics
    alerts: AlertWatch
    running: Callable[[], Mapping[str, int]]
    store_kind: str
    _writing: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def note(self, caller: Caller, account_id: str, action: str, target: str, **detail: Any) -> None:
        """Writes to the audit log, after the effect and before its answer; of too long a detail only the digest."""
        async with self._writing:  # a chain has one end: concurrent changes would retry on each other
            await self.audit.write(account_id, caller.token_id, action, target, **fit_detail(detail))


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path. The caller needs one of the permissions; if there are none, any token will do.

    The types of query, body and result are those that `serve` is annotated with, unless `body` is given.

    versioned   its answer has an ETag, and a PUT or PATCH honours If-Match.
    creates     an Idempotency-Key is honoured.
    optional    its body may be left out.
    cursor      its list continues by cursor, else by page if its query has one.
    csv         it answers `Accept: text/csv` and `format=csv` too.
    """

    method: Literal["GET", "POST", "PUT", "PATCH", "DELETE"]
    path: str
    serve: Callable[[AdminContext, AdminRequest[Any, Any]], Awaitable[AdminResult[Any]]]
    permissions: tuple[Permission, ...]
    summary: str
    _: KW_ONLY
    query: Any = field(init=False)
    body: Any = None
    result: Any = field(init=False)
    versioned: bool = False
    creates: bool = False
    optional: bool = False
    cursor: bool = False
    csv: bool = False

    def __post_init__(self) -> None:
        hints = get_type_hints(self.serve)
        query, body = get_args(hints["request"])
        (result,) = get_args(hints["return"])
        for name, kind in (("query", query), ("body", self.body or body), ("result", result)):
            object.__setattr__(self, name, kind)

    @property
    def hidden(self) -> bool:
        """Whether the path exists for the operator only."""
        return self.path.startswith(f"{OPERATOR}/")

    @property
    def takes_body(self) -> bool:
        return self.body is not NoFields

    @property
    def conditional(self) -> bool:
        return self.versioned and self.method in ("PUT", "PATCH")

    @property
    def paged(self) -> bool:
        return "page" in self.query.__struct_fields__


@contextlib.contextmanager
def values_validated() -> Iterator[None]:
    """Turns what the types of tenants/ say of wrong values into an answer to the caller. Raises ApiError."""
    try:
        yield
    except ValueError as error:
        raise bad_input(str(error)) from None


def time_of(seconds: int) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
