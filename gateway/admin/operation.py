"""What one operation of the API is: its place, who may use it, what it takes and what it answers. It serves nothing."""

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import zip_longest
from typing import Annotated, Any, Final, Generic, Literal, TypeVar

import msgspec
from msgspec import Meta

from gateway.errors import bad_input
from gateway.http.idempotency import IdempotencyStore
from gateway.inference.request import InferenceContext
from gateway.listing.pages import PAGE_MAX, PageItem
from tenants.audit import AuditLog, fit_detail
from tenants.auth.accounts import NAME_MAX, Caller, Permission
from tenants.store.protocol import Store

BASE: Final = "/client/v4"
OPERATOR: Final = f"{BASE}/operator"
ACCOUNT: Final = f"{BASE}/accounts/{{account_id}}"
# What a placeholder of a path may stand for; an account's id is looked at later, for it has an error of its own.
PATH_PARAMETERS: Final = {
    "account_id": "[^/]+",
    "token_id": "[0-9A-Za-z]{1,32}",
    "plan": "[a-z0-9][a-z0-9._-]{0,31}",
}

Q = TypeVar("Q", bound=msgspec.Struct)
B = TypeVar("B")
R = TypeVar("R")
Time = Annotated[datetime, Meta(tz=True)]
Name = Annotated[str, Meta(min_length=1, max_length=NAME_MAX)]
Method = Literal["GET", "POST", "PUT", "PATCH", "DELETE"]


class NoFields(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The query or the body of an operation that takes none."""


class PageQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    page: Annotated[int, Meta(ge=1, le=PAGE_MAX)] = 1
    per_page: Annotated[int, Meta(ge=1, le=100)] = 20


class CursorItem(msgspec.Struct, frozen=True):
    """`cursor` asks for what follows; null where nothing does."""

    count: int
    per_page: int
    cursor: int | None


class ResponseInfo(msgspec.Struct, frozen=True):
    code: int
    message: str
    type: None = None


@dataclass(frozen=True, slots=True)
class OperationRequest(Generic[Q, B]):
    """A request of a caller that may ask it. `names` are what the path says; `account_id` is "" where it names none.

    `revision` is the one that a change is to be based on, as `If-Match` says; None where it says nothing.
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
class OperationResult(Generic[R]):
    """`revision` becomes the ETag. `csv` is sent in place of everything else."""

    result: R
    revision: int | None = None
    page: PageItem | CursorItem | None = None
    messages: tuple[ResponseInfo, ...] = ()
    csv: str | None = None


@dataclass(frozen=True, slots=True)
class AdminContext:
    """What the operations work with; built once, in app.py. `open_requests` are inference requests in progress
    here, `notice_key` gives the key that signs an account's notices."""

    gateway: InferenceContext
    store: Store
    audit: AuditLog
    once: IdempotencyStore
    notice_key: Callable[[str], bytes]
    open_requests: Callable[[], int]
    _writing: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def note(self, caller: Caller, account_id: str, action: str, target: str, **detail: Any) -> None:
        """Into the audit log, after the effect and before its answer. Of too long a detail only its digest is kept."""
        async with self._writing:  # a chain has one end: changes that come at once would try for it in turns
            await self.audit.write(account_id, caller.token_id, action, target, **fit_detail(detail))


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation(Generic[Q, B, R]):
    """One method of one path. Who asks needs one of the permissions; where there are none, any token will do.

    versioned   its answer has an ETag, and a PUT or PATCH honours If-Match.
    creates     an Idempotency-Key is honoured.
    optional    its body may be left out.
    cursor      its list goes on by cursor, else by page where its query has one.
    csv         it answers `Accept: text/csv` and `format=csv` too.
    """

    method: Method
    path: str
    summary: str
    permissions: tuple[Permission, ...]
    serve: Callable[[AdminContext, OperationRequest[Q, B]], Awaitable[OperationResult[R]]]
    query: type[Q]
    body: type[B]
    result: type[R]
    versioned: bool = False
    creates: bool = False
    optional: bool = False
    cursor: bool = False
    csv: bool = False

    @property
    def hidden(self) -> bool:
        """For whoever is no operator the path does not exist."""
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


def path_pattern(path: str) -> re.Pattern[str]:
    """What a path with placeholders matches."""
    parts = re.split(r"\{(\w+)\}", path)  # plain text, a placeholder's name, plain text, …
    named = [f"(?P<{name}>{PATH_PARAMETERS[name]})" for name in parts[1::2]]
    return re.compile("".join(map("".join, zip_longest(map(re.escape, parts[::2]), named, fillvalue=""))))


@contextlib.contextmanager
def values_validated() -> Iterator[None]:
    """What the types of tenants/ say of wrong values is told to the caller. Raises Refusal."""
    try:
        yield
    except ValueError as error:
        raise bad_input(str(error)) from None


def time_of(seconds: int) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
