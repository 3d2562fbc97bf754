"""Paths that lead somewhere, nowhere, or somewhere else: what each family of paths says, over a real socket."""

from pathlib import Path

from gateway.api.routes import dialect_routes
from gateway.catalogue.catalogue import Catalogue
from gateway.errors import V1_PATHS
from gateway.listing.table import LISTS
from tests.support.served_gateway import Answer, looped, served
from tests.support.stub_replica import MODEL

ENVELOPE = {"result", "success", "errors", "messages"}  # beside which every body has `error`


def form(answer: Answer) -> str:
    """The API whose error this is, by what its body begins with."""
    first, *keys = answer.json
    if {first, *keys} == {*ENVELOPE, "error"}:
        return "openai" if first == "error" else "cloudflare" if keys[-1] == "error" else "?"
    return "anthropic" if answer.json.get("type") == "error" else "?"


@looped
async def test_each_family_of_paths_refuses_in_its_own_form(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        own, bad = (f"/client/v4/accounts/{account}/ai" for account in (gateway.account_id, "nobody"))
        cases = [
            ("POST", "/nowhere", 404, 7000, "cloudflare"),
            ("GET", "/ai/", 404, 7000, "cloudflare"),
            ("POST", f"{own}/nowhere", 404, 7000, "cloudflare"),
            ("POST", f"{own}/v1/nowhere", 404, 7000, "openai"),
            ("POST", "/v1/nowhere", 404, 7000, "openai"),
            ("POST", "/v1/", 404, 7000, "openai"),
            ("GET", "/v1/models/", 404, 7000, "openai"),
            ("POST", f"{bad}/nowhere", 404, 7003, "cloudflare"),
            ("POST", f"{bad}/run/{MODEL}", 404, 7003, "cloudflare"),
            ("POST", f"{bad}/v1/chat/completions", 404, 7003, "openai"),
            ("POST", f"{bad}/v1/messages", 404, 7003, "anthropic"),
            ("GET", "/v1/messages", 405, 7001, "anthropic"),
            ("GET", "/ai/v1/messages/count_tokens", 405, 7001, "anthropic"),
            ("DELETE", "/v1/chat/completions", 405, 7001, "openai"),
            ("PUT", "/ai/batches/some", 405, 7001, "cloudflare"),
            ("POST", "/v1/models/a/b", 405, 7001, "openai"),
            ("OPTIONS", f"{own}/run/{MODEL}", 405, 7001, "cloudflare"),
            ("POST", f"/client/v4/accounts/{gateway.account_id}/limits", 405, 7001, "cloudflare"),
        ]
        for method, path, status, code, expected in cases:
            answer = await gateway.call(path, b"", method)
            assert (answer.status, answer.code, form(answer)) == (status, code, expected), (method, path)
        allowed = {
            "/ai/batches/some": "GET, HEAD, DELETE",
            "/ai/batches": "GET, HEAD",
            "/v1/models": "GET, HEAD",
            "/ai/run": "POST",
            f"/client/v4/accounts/{gateway.account_id}/limits": "GET, HEAD, PUT",
        }
        for path, methods in allowed.items():
            assert (await gateway.call(path, b"", "PATCH")).headers["allow"] == methods, path


@looped
async def test_a_path_that_leads_nowhere_names_the_one_that_is_meant(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        cases = {
            "/chat/completions": "/v1/chat/completions",
            "/client/v4/chat/completions": "/v1/chat/completions",
            "/v1/chat/completions/": "/v1/chat/completions",
            "/v1/chat/completion": "/v1/chat/completions",
            "/v1/v1/messages": "/v1/messages",
            "/v1/v1/responses/input_tokens": "/v1/responses/input_tokens",
            "/models": "/v1/models",
        }
        for path, meant in cases.items():
            message = (await gateway.call(path, b"{}")).json["error"]["message"]
            assert f"No route for that URI: {path}; did you mean {meant}? Base URLs end with /v1" in message
        for path in ("/v1/images/generations", "/nowhere", "/v1/"):
            assert "did you mean" not in (await gateway.call(path, b"{}")).json["error"]["message"]
        assert "the console at /console/" in (await gateway.call("/", b"", "GET")).json["error"]["message"]


def test_the_paths_that_a_refusal_may_name_are_those_that_are_served() -> None:
    served_paths = {*dialect_routes(Catalogue([], {})), *LISTS}
    assert set(V1_PATHS) == {path for path in served_paths if path.startswith("/v1/") and "{" not in path}


@looped
async def test_a_line_break_in_a_path_leads_nowhere(tmp_path: Path) -> None:
    """A pattern's `$` would match before it."""
    async with served(tmp_path) as gateway:
        for path in ("/healthz%0A", "/v1/models%0A", f"/ai/run/{MODEL}%0A", "/client/v4/openapi.json%0a", "/ai/%0A/x"):
            answer = await gateway.call(path, b"", "GET")
            assert (answer.status, answer.code) == (404, 7000), path


@looped
async def test_a_name_with_slashes_is_one_model(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        for path in (f"/v1/models/{MODEL}", f"/ai/v1/models/{MODEL.replace('/', '%2F')}"):
            answer = await gateway.call(path, b"", "GET")
            assert (answer.status, answer.json["id"]) == (200, MODEL)
        missing = await gateway.call("/v1/models/a/b/c", b"", "GET")
        assert (missing.status, missing.code) == (404, 3042)
        assert "a/b/c" in missing.message
