"""A served gateway with an operator and two tenants, and a client that holds every answer against the document."""

import contextlib
import json
import re
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from jsonschema import Draft202012Validator, FormatChecker

from tenants.audit import AuditLog
from tenants.records.batches import BatchJob
from tenants.records.grants import Grant, Permission
from tests.support.served_gateway import SECRET, Answer, Served, served
from tests.support.stub_replica import MODEL

BASE: Final = "/client/v4"
OPERATOR: Final = f"{BASE}/operator"
EVERYTHING: Final = tuple(Permission)
HELLO: Final = [{"role": "user", "content": "hello"}]
POLICIES: Final = [{"permission_groups": [{"id": "inference"}]}]
# A body of each kind that does as little as can be.
VECTORS: Final = "@cf/test/vectors"
BATCH: Final = "00000000-0000-4000-8000-000000000000"  # ann's
BODIES: Final[dict[str, Any]] = {
    "AccountChange": {},
    "Limits": {},
    "MachineChange": {"drained": False},
    "NewAccount": {"name": "made by the matrix"},
    "PlanContent": {},
    "Rolled": {},
    "TermsChange": {},
    "TokenGiven": {"name": "made by the matrix", "policies": POLICIES},
    "RerankBody": {"model": VECTORS, "query": "hello", "documents": ["hello"]},
    "EmbeddingsBody": {"model": VECTORS, "input": "hello"},
    "RunNativeBody": {"prompt": "hello", "max_tokens": 1},
    "ChatBody": {"model": MODEL, "messages": HELLO, "max_tokens": 1},
    "CompletionsBody": {"model": MODEL, "prompt": "hello", "max_tokens": 1},
    "ResponsesBody": {"model": MODEL, "input": "hello", "max_output_tokens": 1},
    "InputTokensBody": {"model": MODEL, "input": "hello"},
    "MessagesBody": {"model": MODEL, "messages": HELLO, "max_tokens": 1},
    "CountTokensBody": {"model": MODEL, "messages": HELLO},
    "RunBody": {"model": MODEL, "input": {"prompt": "hello", "max_tokens": 1}},
}


class Document:
    """What the gateway says of itself."""

    def __init__(self, content: dict[str, Any]) -> None:
        self.content = content
        self._patterns = {
            path: re.compile(re.sub(r"\{model\}", ".+", re.sub(r"\{(?!model)\w+\}", "[^/]+", path)))
            for path in content["paths"]
        }
        self._validators: dict[str, Draft202012Validator] = {}

    @property
    def operations(self) -> list[tuple[str, str, dict[str, Any]]]:
        """Method, path and what is said of them."""
        paths = self.content["paths"].items()
        return [(method.upper(), path, said) for path, methods in paths for method, said in methods.items()]

    def operation(self, method: str, path: str) -> dict[str, Any] | None:
        plain = path.partition("?")[0]
        found = [one for one, pattern in self._patterns.items() if pattern.fullmatch(plain)]
        best = min(found, key=lambda one: one.count("{"), default="")
        said: dict[str, Any] | None = self.content["paths"].get(best, {}).get(method.lower())
        return said

    def check(self, method: str, path: str, answer: Answer) -> None:
        """Raises where the answer is not what the document says of it."""
        operation = self.operation(method, path)
        if operation is None:
            assert answer.status in (404, 405), (method, path, answer.status)
            self.validate({"$ref": "#/components/schemas/Error"}, answer.json)
            return
        assert str(answer.status) in operation["responses"], (method, path, answer.status, answer.content)
        said = self._resolved(operation["responses"][str(answer.status)])
        kind = answer.headers["content-type"].partition(";")[0]
        assert kind in said["content"], (method, path, kind)
        if kind == "application/json":
            self.validate(said["content"][kind]["schema"], answer.json)
        elif kind == "text/event-stream":
            for line in answer.content.splitlines():
                if line.startswith(b"data: {"):
                    self.validate(said["content"][kind]["x-event"], json.loads(line[6:]))
        for name in said.get("headers", {}):
            assert name.lower() in answer.headers, (method, path, name)

    def validate(self, schema: dict[str, Any], value: Any) -> None:
        key = json.dumps(schema)
        if key not in self._validators:
            whole = {**schema, "components": self.content["components"]}
            self._validators[key] = Draft202012Validator(whole, format_checker=FormatChecker())
        self._validators[key].validate(value)

    def _resolved(self, said: dict[str, Any]) -> dict[str, Any]:
        name = said.get("$ref", "").rpartition("/")[2]
        found: dict[str, Any] = self.content["components"]["responses"][name] if name else said
        return found


@dataclass
class House:
    """`ann` is the gateway's own tenant, `bob` another one; tokens are their texts."""

    gateway: Served
    document: Document
    operator_id: str
    operator: str
    bob_id: str
    bob: str
    ann: str

    @property
    def ann_id(self) -> str:
        return self.gateway.account_id

    @cached_property
    def account(self) -> str:
        return f"{BASE}/accounts/{self.ann_id}"

    async def token(self, *permissions: Permission, account_id: str | None = None, **more: Any) -> str:
        """The text of a new token, ann's where nobody else is named."""
        grant = Grant(permissions or (Permission.ACCOUNT_ADMIN,))
        _, text = await self.gateway.accounts.mint(account_id or self.ann_id, "another", grant=grant, **more)
        return text

    async def ask(self, method: str, path: str, body: Any = b"", token: str | None = None, **headers: str) -> Answer:
        """By ann's administrator, or another token; "" sends none. The answer is as the document says."""
        text = self.ann if token is None else token
        given = {"authorization": f"Bearer {text}" if text else "", **headers}
        answer = await self.gateway.call(path, body, method, **given)
        self.document.check(method, path, answer)
        return answer

    async def operate(self, method: str, path: str, body: Any = b"", **headers: str) -> Answer:
        """By the operator; the path is below /client/v4/operator."""
        return await self.ask(method, f"{OPERATOR}{path}", body, self.operator, **headers)

    async def audited(self, account_id: str) -> list[tuple[str, str, str]]:
        """Actor, action and target of an account's entries, the oldest first; the chain is whole."""
        audit = AuditLog(self.gateway.app._tenancy.store.audit, SECRET)
        assert (await audit.verify(account_id)).problem is None
        return [(entry.actor, entry.action, entry.target) async for entry in audit.entries(account_id)]


@contextlib.asynccontextmanager
async def served_admin(folder: Path, **options: Any) -> AsyncIterator[House]:
    async with served(folder, **options) as gateway:
        accounts = gateway.accounts
        told = await gateway.call(f"{BASE}/openapi.json", b"", "GET", authorization="")
        assert told.status == 200
        landlord, bob = await accounts.create("landlord"), await accounts.create("bob")
        texts = [
            (await accounts.mint(account_id, "first", grant=Grant((permission,))))[1]
            for account_id, permission in (
                (landlord.id, Permission.OPERATOR),
                (bob.id, Permission.ACCOUNT_ADMIN),
                (gateway.account_id, Permission.ACCOUNT_ADMIN),
            )
        ]
        batches, now = gateway.app._tenancy.store.batches, int(time.time())
        await batches.begin(BatchJob(BATCH, gateway.account_id, "key", MODEL, 1, 600, now, now + 600))
        await batches.open(gateway.account_id, BATCH)
        yield House(gateway, Document(told.json), landlord.id, texts[0], bob.id, texts[1], texts[2])


def same(answer: Answer) -> tuple[int, dict[str, str], bytes]:
    """What must be equal of two answers that nobody may tell apart: all but the request's own id and the time."""
    id_ = answer.headers["x-request-id"]
    headers = {
        name: value for name, value in answer.headers.items() if name not in ("x-request-id", "request-id", "date", "")
    }
    return answer.status, headers, answer.content.replace(id_.encode(), b"")


def filled(path: str, account_id: str, token_id: str = "A" * 11, plan: str = "spare") -> str:
    asked = f"?model={MODEL}" if path.endswith("/models/schema") else ""
    return (
        path.replace("{account_id}", account_id)
        .replace("{token_id}", token_id)
        .replace("{plan}", plan)
        .replace("{request_id}", BATCH)
        .replace("{machine}", "stub")
        .replace("{model}", MODEL)
    ) + asked


def body_of(operation: dict[str, Any]) -> Any:
    if "requestBody" not in operation:
        return b""
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    return BODIES[schema.get("anyOf", [schema])[0]["$ref"].rpartition("/")[2]]
