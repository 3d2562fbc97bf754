"""The operator's accounts: lists, creation exactly once, plans and ceilings, suspension."""

from pathlib import Path
from typing import Any

from tenants.records.accounts import Plan
from tenants.records.grants import Permission
from tenants.records.limits import Limits
from tests.support.admin_api import EVERYTHING, served_admin
from tests.support.served_gateway import looped

POLICIES = [{"permission_groups": [{"id": "account:admin"}]}]


@looped
async def test_an_accounts_life(tmp_path: Path, store_url: str) -> None:
    async with served_admin(tmp_path, store_url=store_url) as house:
        await house.gateway.accounts.put_plan(Plan("free", Limits(requests_per_minute=9)))
        made = await house.operate("POST", "/accounts", {"name": "carol", "plan": "free"})
        carol = made.json["result"]
        assert (carol["name"], carol["plan"], carol["limits"]["in_force"]) == (
            "carol",
            "free",
            {"requests_per_minute": 9},
        )
        path = f"/accounts/{carol['id']}"
        assert (await house.operate("GET", path)).json == made.json

        minted = await house.operate("POST", f"{path}/tokens", {"name": "first", "policies": POLICIES})
        first = minted.json["result"]["value"]
        own = await house.ask("GET", f"/client/v4{path}", token=first)
        assert own.json["result"] == carol
        (token,) = (await house.operate("GET", f"{path}/tokens")).json["result"]
        assert (token["id"], "value" in token) == (minted.json["result"]["id"], False)

        change = {"name": "carol 2", "plan": "default", "ceiling": {"concurrent_requests": 2}}
        changed = await house.operate("PATCH", path, change, if_match=made.headers["etag"])
        assert changed.json["result"]["limits"]["most"]["concurrent_requests"] == 2
        assert (await house.operate("PATCH", path, change, if_match=made.headers["etag"])).status == 412
        assert (await house.operate("PATCH", path, {"ceiling": {}})).json["result"]["name"] == "carol 2"

        suspended = await house.operate("POST", f"{path}/suspend")
        assert suspended.json["result"]["suspended_on"]
        house.gateway.see_changes()
        assert (await house.ask("GET", f"/client/v4{path}", token=first)).code == 9109
        await house.operate("POST", f"{path}/resume")
        house.gateway.see_changes()
        assert (await house.ask("GET", f"/client/v4{path}", token=first)).status == 200

        await house.operate("DELETE", f"{path}/tokens/{token['id']}")
        house.gateway.see_changes()
        assert (await house.ask("GET", f"/client/v4{path}", token=first)).status == 401
        operator = house.operator.split("_")[1]
        assert [entry[:2] for entry in await house.audited(carol["id"])] == [
            (operator, f"{action}")
            for action in (
                "account.create", "token.create", "account.change", "account.change", "account.suspend",
                "account.resume", "token.revoke",
            )
        ]  # fmt: skip


@looped
async def test_lists_by_name_plan_and_suspension(tmp_path: Path, store_url: str) -> None:
    async with served_admin(tmp_path, store_url=store_url) as house:
        await house.gateway.accounts.put_plan(Plan("free"))
        for name in ("Zoë one", "zoË two"):
            await house.operate("POST", "/accounts", {"name": name, "plan": "free"})
        await house.gateway.accounts.suspend(house.bob_id)
        for query, names in (
            ("name=zo%C3%AB", {"Zoë one", "zoË two"}), ("plan=free&name=one", {"Zoë one"}), ("suspended=true", {"bob"}),
            ("plan=nothing", set()), ("name=bob&suspended=false", set()),
        ):  # fmt: skip
            found = (await house.operate("GET", f"/accounts?{query}")).json
            assert {account["name"] for account in found["result"]} == names, query
            assert found["result_info"]["total_count"] == len(names)
        pages = [(await house.operate("GET", f"/accounts?per_page=2&page={page}")).json for page in (1, 2, 3, 4)]
        ids = [account["id"] for page in pages for account in page["result"]]
        assert ids == [account.id for account in await house.gateway.accounts.list()]
        assert [page["result_info"]["count"] for page in pages] == [2, 2, 1, 0]
        for query in ("page=0", "per_page=101", "suspended=1", "colour=red", f"name={'n' * 101}"):
            assert (await house.operate("GET", f"/accounts?{query}")).status == 400, query


@looped
async def test_wrong_terms_change_nothing(tmp_path: Path) -> None:
    async with served_admin(tmp_path) as house:
        before = await house.gateway.accounts.list()
        wrong: list[Any] = [
            b"", {"plan": "nothing"}, {"name": " "}, {"ceiling": {"requests_per_minute": -1}}, {"settings": {}},
            {"ceiling": None}, {"plan": 7},
        ]  # fmt: skip
        for body in wrong:
            assert (await house.operate("PATCH", f"/accounts/{house.bob_id}", body)).status == 400, body
            created = {"name": "n", **body} if body and body != {"name": " "} else body
            assert (await house.operate("POST", "/accounts", created)).status == 400, body
        assert (await house.operate("PATCH", f"/accounts/{'0' * 32}", {})).code == 1003
        assert (await house.operate("PATCH", "/accounts/nobody", {})).code == 7003
        assert (await house.operate("POST", f"/accounts/{'0' * 32}/suspend")).code == 1003
        assert (
            await house.operate("POST", f"/accounts/{'0' * 32}/tokens", {"name": "n", "policies": POLICIES})
        ).status == 404
        assert (await house.operate("GET", f"/accounts/{'0' * 32}/tokens")).status == 404
        assert await house.gateway.accounts.list() == before


@looped
async def test_an_operators_token_cannot_be_minted_here(tmp_path: Path) -> None:
    async with served_admin(tmp_path) as house:
        policies = [{"permission_groups": [{"id": "operator"}]}]
        answer = await house.operate("POST", f"/accounts/{house.bob_id}/tokens", {"name": "n", "policies": policies})
        assert answer.status == 400
        assert "permission_groups" in answer.message


@looped
async def test_whoever_is_both_may_both(tmp_path: Path) -> None:
    async with served_admin(tmp_path) as house:
        token = await house.token(*EVERYTHING)
        for path in (house.account, "/client/v4/operator/accounts"):
            assert (await house.ask("GET", path, token=token)).status == 200
        reader = await house.token(Permission.USAGE_READ)
        assert (await house.ask("GET", "/client/v4/operator/accounts", token=reader)).code == 7000
