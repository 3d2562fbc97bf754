"""The document is valid, whole, and says of who may what what the gateway does."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openapi_spec_validator import OpenAPIV31SpecValidator, validate

from gateway.admin.table import OPERATIONS, ROUTES
from gateway.settings.config import ModelEntryConfig
from tenants.deletion import delete, restore
from tenants.records.accounts import Plan
from tenants.records.grants import Permission
from tests.support import minilm
from tests.support.admin_api import EVERYTHING, OPERATOR, VECTORS, House, body_of, filled, same, served_admin
from tests.support.served_gateway import Answer, looped

NOBODY = "0" * 32


@looped
async def test_the_document_is_valid_openapi_3_1(tmp_path: Path) -> None:
    async with served_admin(tmp_path) as house:
        said = house.document.content
        assert said["openapi"].startswith("3.1.")
        validate(said, cls=OpenAPIV31SpecValidator)
        assert r"\\Z" not in json.dumps(said), "patterns are read by JavaScript as well"
        ids = [operation["operationId"] for _, _, operation in house.document.operations]
        assert len(set(ids)) == len(ids)
        assert all(
            operation["responses"].keys() >= {"200", "400", "503"} for _, _, operation in house.document.operations
        )


@looped
async def test_all_of_the_table_is_described_and_all_that_is_described_is_served(tmp_path: Path) -> None:
    async with served_admin(tmp_path) as house:
        described = {(method, path) for method, path, _ in house.document.operations}
        assert described == {(one.method, one.path) for one in [*OPERATIONS, *ROUTES]}
        for method, path, _ in house.document.operations:
            answer = await house.gateway.call(filled(path, house.bob_id), b"", method, authorization="")
            assert answer.status not in (404, 405), (method, path)
        for path in house.document.content["paths"]:
            for method in {"GET", "POST", "PUT", "PATCH", "DELETE"} - {one for one, its in described if its == path}:
                answer = await house.gateway.call(
                    filled(path, house.operator_id), b"", method, authorization=f"Bearer {house.operator}"
                )
                assert answer.status == 405, (method, path)
                assert method not in answer.headers["allow"]


@dataclass
class Principal:
    name: str
    token: str
    permissions: tuple[Permission, ...]
    own: bool = True  # the account that the paths name is its own
    refused: tuple[int, ...] = ()  # what it is told wherever a token is needed


async def principals(house: House) -> list[Principal]:
    """Eight, the last one in three kinds."""
    accounts = house.gateway.accounts
    suspended = await accounts.create("suspended")
    late = await house.token(*EVERYTHING, expires_at=1)
    revoked = await house.token(*EVERYTHING)
    await accounts.revoke(revoked.split("_")[1])
    frozen = await house.token(*EVERYTHING, account_id=suspended.id)
    await accounts.suspend(suspended.id)
    return [
        Principal("nobody", "", (), refused=(401,)),
        Principal("junk", "hearth_junk", (), refused=(401,)),
        Principal("another account's administrator", house.bob, (Permission.ACCOUNT_ADMIN,), own=False),
        Principal("inference", house.gateway.token, (Permission.INFERENCE,)),
        Principal("usage", await house.token(Permission.USAGE_READ), (Permission.USAGE_READ,)),
        Principal("administrator", house.ann, (Permission.ACCOUNT_ADMIN,)),
        Principal("operator", house.operator, (Permission.OPERATOR,), own=False),
        Principal("suspended", frozen, (), own=False, refused=(403,)),
        Principal("expired", late, (), refused=(401,)),
        Principal("revoked", revoked, (), refused=(401,)),
    ]


def permitted(operation: dict[str, Any], path: str, who: Principal) -> bool:
    """What the document says of it."""
    security = operation["security"]
    if {} in security:
        return True
    if who.refused or ("{account_id}" in path and not path.startswith(OPERATOR) and not who.own):
        return False
    return any(set(one.get("token", ())) <= set(who.permissions) for one in security if "token" in one)


@looped
async def test_every_principal_may_what_the_document_says_and_nothing_else(tmp_path: Path) -> None:
    """Every operation by every principal. What is another's looks like what is not, byte for byte."""
    vectors = ModelEntryConfig(name=VECTORS, folder=str(minilm.folder()))
    async with served_admin(tmp_path, models=[vectors], stubs=[VECTORS], address_failures=10_000) as house:
        asked = allowed = 0
        for who in await principals(house):
            for method, path, operation in house.document.operations:
                answer = await ask(house, method, path, operation, who, house.ann_id)
                asked += 1
                if permitted(operation, path, who):
                    assert answer.status == 200, (who.name, method, path, answer.content)
                    allowed += 1
                    continue
                assert answer.status in expected(path, who), (who.name, method, path, answer.content)
                await check_hidden(house, method, path, operation, who, answer)
        assert asked == 10 * (len(OPERATIONS) + len(ROUTES))
        assert allowed >= len(OPERATIONS) + len(ROUTES)
        print(f"{asked} asked, {allowed} allowed as the document says, 0 beside it")


def expected(path: str, who: Principal) -> tuple[int, ...]:
    if path.startswith(OPERATOR):
        return tuple(404 if status == 403 else status for status in who.refused or (403,))
    return who.refused or (403,)


async def ask(
    house: House, method: str, path: str, operation: dict[str, Any], who: Principal, account_id: str
) -> Answer:
    """With a token and a plan that may go, so that whoever is let in does no harm to those after it."""
    accounts = house.gateway.accounts
    spare, _ = await accounts.mint(house.ann_id, "spare")
    await accounts.put_plan(Plan("spare"))
    now_s = house.gateway.app._tenancy.clock()
    if path.endswith("/restore"):
        await delete(accounts, house.ann_id, now_s)
    try:
        return await house.ask(method, filled(path, account_id, spare.id), body_of(operation), token=who.token)
    finally:
        if (await accounts.get(house.ann_id)).deletion is not None:
            await restore(accounts, house.ann_id, now_s)
        await accounts.resume(house.ann_id)


async def check_hidden(
    house: House, method: str, path: str, operation: dict[str, Any], who: Principal, answer: Answer
) -> None:
    """The account that there is, and one that there is not: the answers are the same."""
    if path.startswith(f"{OPERATOR}/"):
        nowhere = f"{OPERATOR}/nowhere"
        other = await house.gateway.call(nowhere, body_of(operation), method, authorization=f"Bearer {who.token}")
        if who.refused in ((), (403,)):
            there = filled(path, house.ann_id)
            status, headers, content = same(answer)
            cleaned = content.partition(b": /")[0], {**headers, "content-length": ""}, status
            status, headers, content = same(other)
            assert cleaned == (content.partition(b": /")[0], {**headers, "content-length": ""}, status), there
    elif "{account_id}" in path and not who.own:
        missing = await ask(house, method, path, operation, who, NOBODY)
        assert same(missing) == same(answer), (who.name, method, path)


@looped
async def test_ids_of_others_within_an_own_path_are_like_ids_of_nobody(tmp_path: Path) -> None:
    async with served_admin(tmp_path) as house:
        foreign = (await house.gateway.accounts.tokens(house.bob_id))[0]
        tried = 0
        for method, path, operation in house.document.operations:
            if "{token_id}" not in path or path.startswith(OPERATOR):
                continue
            theirs, nobodys = [
                await house.ask(method, filled(path, house.ann_id, one), body_of(operation))
                for one in (foreign.id, "A" * 11)
            ]
            assert theirs.status == 404
            assert same(theirs) == same(nobodys), (method, path)
            tried += 1
        assert tried >= 4
        left = [await house.ask("GET", f"{house.account}/limits/left?token={one}") for one in (foreign.id, "A" * 11)]
        assert same(left[0]) == same(left[1])
        assert (await house.gateway.accounts.token(foreign.id)).revoked_at is None


def test_an_operation_that_is_open_to_any_token_would_be_found() -> None:
    """The matrix reads what it expects from the document, so the document is held to the rule here."""
    for operation in OPERATIONS:
        wanted = {Permission.OPERATOR} if operation.path.startswith(OPERATOR) else {
            Permission.ACCOUNT_ADMIN, Permission.USAGE_READ
        }  # fmt: skip
        assert set(operation.permissions) <= wanted, operation.path
        assert operation.permissions or operation.path.endswith("/tokens/verify"), operation.path
        reads = {Permission.USAGE_READ} & set(operation.permissions)
        assert not reads or operation.method == "GET", operation.path
