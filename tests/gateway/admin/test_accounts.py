"""The operator's accounts: lists, creation exactly once, plans and ceilings, suspension."""

from pathlib import Path
from typing import Any

from tenants.records.accounts import Account, Plan
from tenants.records.grants import Permission
from tenants.records.limits import NO_LIMITS, Limits
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
        for query in ("page=0", "per_page=201", "suspended=1", "colour=red", f"name={'n' * 101}"):
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
async def test_the_operator_names_accounts_and_learns_which_ids_share_a_name(tmp_path: Path) -> None:
    async with served_admin(tmp_path) as house:
        assert (await house.operate("GET", "/accounts/BOB")).json["result"]["id"] == house.bob_id
        assert (await house.operate("POST", "/accounts/bob/suspend")).json["result"]["suspended_on"] is not None
        assert (await house.operate("POST", "/accounts/bob/resume")).json["result"]["suspended_on"] is None
        assert (await house.operate("GET", "/accounts/bob/tokens")).status == 200
        assert (await house.operate("GET", "/usage?account=bob")).status == 200
        assert (await house.operate("GET", "/audit/verify?account=bob")).json["result"]["intact"]
        assert (await house.operate("GET", "/usage?account=nobody")).code == 1003
        twin = Account("f" * 32, "Bob", NO_LIMITS, 1)
        await house.gateway.app._tenancy.store.accounts.add(twin, shared_name=True)
        for path in ("/accounts/bob", "/usage?account=bob"):
            refused = await house.operate("GET", path)
            assert refused.status == 409, path
            assert twin.id in refused.content.decode()
            assert house.bob_id in refused.content.decode()


@looped
async def test_a_name_that_is_taken_is_a_conflict_that_names_nobody(tmp_path: Path) -> None:
    async with served_admin(tmp_path) as house:
        before = await house.gateway.accounts.list()
        for method, path, body in (
            ("POST", "/accounts", {"name": "BOB"}),
            ("PATCH", "/accounts/test", {"name": "bob"}),
        ):
            refused = await house.operate(method, path, body)
            assert (refused.status, refused.code) == (409, 1009)
        own = await house.ask("PATCH", house.account, {"name": "Bob"})
        assert own.status == 409
        assert house.bob_id not in own.content.decode()
        assert await house.gateway.accounts.list() == before


@looped
async def test_a_callers_own_path_takes_its_name_and_no_other(tmp_path: Path) -> None:
    async with served_admin(tmp_path) as house:
        own = await house.ask("GET", "/client/v4/accounts/TEST")
        assert own.json["result"]["id"] == house.ann_id
        names = ("bob", "nobody", "te")
        answers = [await house.ask("GET", f"/client/v4/accounts/{name}") for name in names]
        assert {(answer.status, answer.code) for answer in answers} == {(404, 7003)}
        told = [answer.json["errors"][0]["message"] for answer in answers]
        same = {message.replace(f"/{name},", "/X,") for message, name in zip(told, names, strict=True)}
        assert len(same) == 1, "an answer tells nothing of others"
        assert (await house.ask("GET", f"/client/v4/accounts/{house.bob_id}")).status == 403
        assert (await house.ask("GET", "/client/v4/accounts/test", token="")).status == 401
        renamed = await house.ask("PATCH", "/client/v4/accounts/test", {"name": "Test 2"})
        assert renamed.status == 200
        house.gateway.accounts._verified.clear()  # as half a second later
        assert (await house.ask("GET", "/client/v4/accounts/test")).code == 7003
        assert (await house.ask("GET", "/client/v4/accounts/test%202")).status == 200


@looped
async def test_an_account_is_deleted_with_a_grace_and_restored(tmp_path: Path) -> None:
    async with served_admin(tmp_path) as house:
        deleted = await house.operate("DELETE", "/accounts/bob?grace_seconds=60")
        assert deleted.json["result"]["removed_on"] > deleted.json["result"]["suspended_on"]
        assert (await house.operate("POST", "/accounts/bob/resume")).status == 409
        assert (await house.operate("DELETE", "/accounts/bob")).status == 409
        restored = await house.operate("POST", "/accounts/bob/restore")
        assert (restored.json["result"]["removed_on"], restored.json["result"]["suspended_on"]) == (None, None)
        assert (await house.operate("POST", "/accounts/bob/restore")).status == 409
        actions = [action for _, action, _ in await house.audited(house.bob_id)]
        assert actions[-2:] == ["account.delete", "account.restore"]


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
