"""The lists of the catalogue as callers get them, on all their paths."""

from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from gateway.catalogue.catalogue import BUILT_IN
from gateway.settings.config import ModelEntryConfig, PriceConfig, SettingsError, load_config
from tenants.records.grants import Grant, Permission
from tests.support.served_gateway import Served, looped, served
from tests.support.stub_replica import MODEL
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("one_day")
FOLDER = str(Path(__file__).parents[3] / "engine" / "builtin_model")
TRIAL = "@hf/acme/trial"
GONE = "@cf/acme/gone"
TEXT_GENERATION = "c329a1f9-323d-4e91-b2aa-582dd4188d34"


def today() -> date:
    return datetime.now(UTC).date()


def entry(name: str, **said: Any) -> ModelEntryConfig:
    return ModelEntryConfig(name=name, folder=FOLDER, **said)


def entries(ended: date | None = None) -> list[ModelEntryConfig]:
    """One in beta with all that can be said of a model, and one that is served no more."""
    trial = entry(
        TRIAL,
        beta=True,
        tags=["small"],
        aliases=["gpt-4o-mini", "@cf/acme/alias"],
        terms="https://acme.example/terms",
        info="https://acme.example/about",
        planned_deprecation_date=today() + timedelta(days=1),
        description="On trial",
        price=PriceConfig(input=100.0, cached_input=10.0, output=300.0),
    )
    return [trial, entry(GONE, planned_deprecation_date=ended or today())]


async def listed(gateway: Served, path: str) -> Any:
    answer = await gateway.call(path, b"", "GET")
    assert answer.status == 200, answer.content
    return answer.json


async def names(gateway: Served, query: str = "") -> list[str]:
    found = await listed(gateway, f"/ai/models/search{query}")
    assert found["result_info"]["count"] == len(found["result"])
    return [item["name"] for item in found["result"]]


@looped
async def test_every_filter_of_the_search_leaves_out_what_it_says(tmp_path: Path) -> None:
    async with served(tmp_path, models=entries()) as gateway:
        assert sorted(await names(gateway)) == [BUILT_IN, MODEL, TRIAL]
        assert await names(gateway, "?search=STUB") == [MODEL]
        assert await names(gateway, "?search=on%20trial") == [TRIAL]
        assert await names(gateway, "?search=nothing") == []
        assert await names(gateway, "?author=hearth&task=Text%20Generation") == [BUILT_IN]
        assert await names(gateway, f"?author=Acme&task={TEXT_GENERATION}") == [TRIAL]
        assert await names(gateway, "?task=Translation") == []
        assert await names(gateway, "?source=2") == await names(gateway, "?source=2.0") == [TRIAL]
        assert await names(gateway, "?source=1&search=trial") == []
        assert TRIAL not in await names(gateway, "?hide_experimental=true")
        assert sorted(await names(gateway, "?include_deprecated=true")) == [GONE, BUILT_IN, MODEL, TRIAL]


@looped
async def test_a_model_that_ended_is_shown_for_three_months_to_who_asks(tmp_path: Path) -> None:
    async with served(tmp_path, models=entries(today() - timedelta(days=100))) as gateway:
        assert GONE not in await names(gateway, "?include_deprecated=true")


@looped
async def test_pages_end_in_an_empty_one_and_wrong_queries_are_named(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        assert len(await names(gateway, "?per_page=1&page=2")) == 1
        assert await names(gateway, "?per_page=1&page=3") == []
        for query, field in (
            ("page=0", "page"),
            ("page=x", "page"),
            ("page=-1", "page"),
            ("per_page=1001", "per_page"),
            ("source=x", "source"),
            ("hide_experimental=maybe", "hide_experimental"),
            ("format=csv", "format"),
            ("colour=red", "colour"),
        ):
            answer = await gateway.call(f"/ai/models/search?{query}", b"", "GET")
            assert (answer.status, answer.code) == (400, 5006), query
            assert f"'{field}'" in answer.message


@looped
async def test_an_item_says_what_the_settings_and_the_folder_say(tmp_path: Path) -> None:
    async with served(tmp_path, models=entries()) as gateway:
        (item,) = (await listed(gateway, "/ai/models/search?search=trial"))["result"]
        assert item["source"] == 2
        assert item["task"] == {
            "id": TEXT_GENERATION,
            "name": "Text Generation",
            "description": item["task"]["description"],
        }
        assert item["tags"] == ["small"]
        properties = {one["property_id"]: one["value"] for one in item["properties"]}
        prices = {one["unit"]: one["price"] for one in properties.pop("price")}
        assert prices == {
            "per M input tokens": 100.0,
            "per M cached input tokens": 10.0,
            "per M output tokens": 300.0,
        }
        assert (
            properties.items()
            >= {
                "context_window": "8192",
                "function_calling": "true",
                "async_queue": "true",
                "beta": "true",
                "planned_deprecation_date": (today() + timedelta(days=1)).isoformat(),
                "terms": "https://acme.example/terms",
                "info": "https://acme.example/about",
            }.items()
        )


@looped
async def test_a_context_window_is_what_the_replica_has(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        (stub,) = (await listed(gateway, "/ai/models/search?search=stub"))["result"]
        expected = gateway.behaviour.context_tokens
        assert {"property_id": "context_window", "value": str(expected)} in stub["properties"]


@looped
async def test_a_model_sees_where_its_replica_takes_images(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        fleet = gateway.app._serving.context.fleet
        assert not fleet.takes_images(MODEL, True)  # a folder that sees, on a device where nothing encodes images
        assert (fleet.takes_images(TRIAL, True), fleet.takes_images(TRIAL, False)) == (True, False)
        gateway.behaviour.image_tokens = 256
        gateway.fleet.replicas[0].die()
        await until(lambda: fleet.takes_images(MODEL, False))
        (stub,) = (await listed(gateway, "/ai/models/search?search=stub"))["result"]
        assert {"property_id": "vision", "value": "true"} in stub["properties"]
        (offer,) = (await listed(gateway, "/ai/models/search?format=openrouter&search=stub"))["data"]
        assert offer["input_modalities"] == ["text", "image"]


@looped
async def test_openrouter_reads_dollars_for_a_token(tmp_path: Path) -> None:
    async with served(tmp_path, models=entries(), neuron_usd=0.00001) as gateway:
        (offer,) = (await listed(gateway, "/ai/models/search?format=openrouter&search=trial"))["data"]
        assert offer["pricing"]["prompt"] == "0.000000001"
        assert offer["pricing"]["completion"] == "0.000000003"
        assert offer["pricing"]["image"] == "0"
        assert offer["hugging_face_id"] == "acme/trial"
        assert offer["context_length"] == 8192
        assert offer["deprecation_date"] == (today() + timedelta(days=1)).isoformat()
        assert "tools" in offer["supported_features"]


@looped
async def test_tasks_and_authors_are_those_of_the_models_there(tmp_path: Path) -> None:
    async with served(tmp_path, models=entries()) as gateway:
        for below in ("/ai", f"/client/v4/accounts/{gateway.account_id}/ai"):
            tasks = await listed(gateway, f"{below}/tasks/search")
            assert [(task["id"], task["name"]) for task in tasks["result"]] == [(TEXT_GENERATION, "Text Generation")]
            authors = await listed(gateway, f"{below}/authors/search")
            assert [author["name"] for author in authors["result"]] == ["acme", "hearth", "test"]
        assert (await gateway.call("/ai/tasks/search?page=1", b"", "GET")).status == 400


@looped
async def test_v1_models_has_the_fields_of_openai_and_of_anthropic(tmp_path: Path) -> None:
    async with served(tmp_path, models=entries()) as gateway:
        for path in ("/v1/models", "/ai/v1/models", f"/client/v4/accounts/{gateway.account_id}/ai/v1/models"):
            found = await listed(gateway, path)
            assert found["object"] == "list"
            ids = [model["id"] for model in found["data"]]
            assert ids == [BUILT_IN, MODEL, TRIAL, "gpt-4o-mini", "@cf/acme/alias"]
            assert (found["first_id"], found["last_id"], found["has_more"]) == (ids[0], ids[-1], False)
            assert (
                {model["object"] for model in found["data"]} == {model["type"] for model in found["data"]} == {"model"}
            )
        last = await listed(gateway, f"/v1/models?limit=2&after_id={MODEL}")
        assert ([model["id"] for model in last["data"]], last["has_more"]) == ([TRIAL, "gpt-4o-mini"], True)
        before = await listed(gateway, f"/v1/models?limit=1&before_id={TRIAL}")
        assert ([model["id"] for model in before["data"]], before["has_more"]) == ([MODEL], True)
        empty = await listed(gateway, "/v1/models?after_id=@cf/acme/alias")
        assert (empty["data"], empty["first_id"]) == ([], None)
        assert (await gateway.call("/v1/models?after_id=nobody", b"", "GET")).code == 5006
        assert (await gateway.call("/v1/models", b"", "GET", authorization="Bearer junk")).status == 401


@looped
async def test_one_model_is_found_by_its_name_however_it_is_spelled(tmp_path: Path) -> None:
    async with served(tmp_path, models=entries()) as gateway:
        for name in (BUILT_IN, quote(BUILT_IN, safe=""), "gpt-4o-mini"):
            for below in ("", "/ai", f"/client/v4/accounts/{gateway.account_id}/ai"):
                assert (await listed(gateway, f"{below}/v1/models/{name}"))["id"] in (BUILT_IN, "gpt-4o-mini")
        missing = await gateway.call("/v1/models/nothing", b"", "GET")
        assert (missing.status, missing.code) == (404, 3042)
        assert missing.json["error"]["code"] == "model_not_found"
        for path in ("/v1/models/", f"/v1/models/{BUILT_IN}/more"):
            assert (await gateway.call(path, b"", "GET")).status == 404


@looped
async def test_a_token_sees_the_models_that_it_may_call_and_no_others(tmp_path: Path) -> None:
    async with served(tmp_path, models=entries()) as gateway:
        grant = Grant((Permission.INFERENCE,), models=("@cf/hearth/*",))
        _, gateway.token = await gateway.accounts.mint(gateway.account_id, "narrow", grant=grant)
        assert await names(gateway) == [BUILT_IN]
        assert [model["id"] for model in (await listed(gateway, "/v1/models"))["data"]] == [BUILT_IN]
        assert [author["name"] for author in (await listed(gateway, "/ai/authors/search"))["result"]] == ["hearth"]
        assert (await gateway.call(f"/v1/models/{TRIAL}", b"", "GET")).status == 404
        schema = await gateway.call(f"/ai/models/schema?model={TRIAL}", b"", "GET")
        assert (schema.status, schema.code) == (400, 5007)
        assert (await gateway.chat(model="gpt-4o-mini")).code == 3041


@looped
async def test_an_alias_is_called_like_its_model_and_echoed(tmp_path: Path) -> None:
    async with served(tmp_path, models=[entry(MODEL, aliases=["gpt-4o-mini"])]) as gateway:
        answer = await gateway.chat(model="gpt-4o-mini", max_tokens=1)
        assert (answer.status, answer.json["model"]) == (200, "gpt-4o-mini")
        assert (await gateway.call("/ai/run/gpt-4o-mini", {"prompt": "hello", "max_tokens": 1})).status == 200
        await gateway.settled()
        assert [record.model for record in await gateway.records()] == [MODEL, MODEL]


@looped
async def test_the_end_of_a_name_finds_its_model_on_every_path_and_what_finds_none_is_told_what_is_alike(
    tmp_path: Path,
) -> None:
    short, alike = MODEL.rpartition("/")[2], "gpt-5o-mini"
    models = [entry(MODEL, aliases=["gpt-4o-mini"])]
    async with served(tmp_path, models=models) as gateway:
        for answer in (
            await gateway.chat(model=short, max_tokens=1),
            await gateway.call(f"/ai/run/{short}", {"prompt": "hello", "max_tokens": 1}),
            await gateway.call("/ai/run", {"model": short, "input": {"prompt": "hello", "max_tokens": 1}}),
            await gateway.call(f"/v1/models/{short}", b"", "GET"),
            await gateway.call(f"/ai/models/schema?model={short}", b"", "GET"),
        ):
            assert answer.status == 200, answer.content
        await gateway.settled()
        assert {record.model for record in await gateway.records()} == {MODEL}
        for answer in (
            await gateway.chat(model=alike),
            await gateway.call(f"/ai/run/{alike}", {"prompt": "hello"}),
            await gateway.call("/ai/run", {"model": alike, "input": {"prompt": "hello"}}),
            await gateway.call(f"/v1/models/{alike}", b"", "GET"),
            await gateway.call(f"/ai/models/schema?model={alike}", b"", "GET"),
        ):
            assert "did you mean gpt-4o-mini?" in answer.message
        grant = Grant(models=(BUILT_IN,))
        _, narrow = await gateway.accounts.mint(gateway.account_id, "narrow", grant=grant)
        hidden = await gateway.call("/ai/run/gpt-5o-mini", {"prompt": "x"}, authorization=f"Bearer {narrow}")
        assert "did you mean" not in hidden.message


@looped
async def test_a_model_that_ended_is_gone_and_says_since_when(tmp_path: Path) -> None:
    async with served(tmp_path, models=entries()) as gateway:
        native = await gateway.call(f"/ai/run/{GONE}", {"prompt": "hello"})
        chat = await gateway.chat(model=GONE)
        for answer in (native, chat):
            assert (answer.status, answer.code) == (410, 5028)
            assert today().isoformat() in answer.message
        assert chat.json["error"]["param"] == "model"


def test_models_share_no_names(tmp_path: Path) -> None:
    text = "[[models]]\nname = '@cf/a/b'\n[[models]]\nname = '@cf/a/c'\naliases = ['@cf/a/b']"
    (tmp_path / "hearth.toml").write_text(text)
    with pytest.raises(SettingsError, match="@cf/a/b"):
        load_config(tmp_path / "hearth.toml")
