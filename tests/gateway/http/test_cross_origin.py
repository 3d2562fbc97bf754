"""What pages of other origins may do, as a browser is told."""

from pathlib import Path
from typing import Any

import pytest

from gateway.settings.config import SettingsError, load_config
from tenants.records.limits import Limits
from tests.support.served_gateway import Served, looped, served
from tests.support.stub_replica import MODEL

PAGE = "https://app.example.com"
PREFLIGHT = {"access_control_request_method": "POST", "access_control_request_headers": "authorization,content-type"}


async def asked(gateway: Served, origin: str, **headers: str) -> tuple[int, dict[str, str]]:
    """Status and headers of a preflight for a call of a model, without a token, as browsers send it."""
    answer = await gateway.call(
        "/v1/chat/completions", b"", "OPTIONS", authorization="", origin=origin, **PREFLIGHT, **headers
    )
    return answer.status, {name: value for name, value in answer.headers.items() if name.startswith("access-control")}


@looped
async def test_by_default_no_other_origin_may_call(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        assert await asked(gateway, PAGE) == (403, {})
        answer = await gateway.call("/v1/models", b"", "GET", origin=PAGE)
        assert answer.status == 200
        assert not [name for name in answer.headers if name.startswith("access-control")]
        refused = await gateway.call("/v1/models", b"", "OPTIONS", origin=PAGE, **PREFLIGHT)
        assert PAGE in refused.message
        assert "allowed_origins" in refused.message


@looped
async def test_a_page_of_an_allowed_origin_may_ask_and_read_all_headers(tmp_path: Path) -> None:
    async with served(tmp_path, allowed_origins=[PAGE, "http://localhost:3000"]) as gateway:
        status, headers = await asked(gateway, PAGE)
        assert status == 204
        assert headers == {
            "access-control-allow-origin": PAGE,
            "access-control-allow-methods": "GET, HEAD, POST, PUT, PATCH, DELETE",
            "access-control-allow-headers": "authorization,content-type",
            "access-control-expose-headers": "*",
            "access-control-max-age": "600",
        }
        for path, method, expected in (
            ("/v1/models", "GET", 200), ("/nowhere", "GET", 404), (f"/ai/run/{MODEL}", "POST", 400),
            ("/metrics", "GET", 200),
        ):  # fmt: skip
            answer = await gateway.call(path, b"", method, origin=PAGE)
            assert answer.status == expected
            assert answer.headers["access-control-allow-origin"] == PAGE
            assert answer.headers["access-control-expose-headers"] == "*"
            assert "Origin" in answer.headers["vary"]
            assert "access-control-allow-credentials" not in answer.headers


@looped
async def test_another_origin_than_those_allowed_gets_no_leave(tmp_path: Path) -> None:
    async with served(tmp_path, allowed_origins=[PAGE]) as gateway:
        for origin in ("https://evil.example", f"{PAGE}.evil.example", "http://app.example.com", "null", PAGE.upper()):
            assert (await asked(gateway, origin))[0] == 403, origin
            answer = await gateway.call("/v1/models", b"", "GET", origin=origin)
            assert answer.status == 200, "the browser keeps it from the page; curl says an Origin as it likes"
            assert "access-control-allow-origin" not in answer.headers
            assert answer.headers["vary"] == "Origin", "a cache must not give this answer to the page that may"


@looped
async def test_a_stream_and_an_answer_over_a_limit_can_be_read_by_the_page(tmp_path: Path) -> None:
    async with served(tmp_path, allowed_origins=["*"], limits=Limits(requests_per_minute=1)) as gateway:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "stream": True, "max_tokens": 2}
        stream = await gateway.call("/v1/chat/completions", body, origin=PAGE)
        assert stream.events[-1] == "[DONE]"
        refused = await gateway.call("/v1/chat/completions", body, origin=PAGE)
        assert (refused.status, "retry-after" in refused.headers) == (429, True)
        for answer in (stream, refused):
            assert answer.headers["access-control-allow-origin"] == "*"
            assert "ratelimit" in answer.headers


@looped
async def test_options_that_no_browser_sends_are_a_method_like_others(tmp_path: Path) -> None:
    async with served(tmp_path, allowed_origins=["*"]) as gateway:
        assert (await gateway.call("/v1/models", b"", "OPTIONS", origin=PAGE)).status == 405
        assert (await gateway.call("/v1/models", b"", "OPTIONS", access_control_request_method="GET")).status == 405


@looped
async def test_names_of_headers_that_are_no_names_are_not_echoed(tmp_path: Path) -> None:
    async with served(tmp_path, allowed_origins=["*"]) as gateway:
        headers: dict[str, Any] = {**PREFLIGHT, "access_control_request_headers": 'a"b<script>'}
        answer = await gateway.call("/v1/models", b"", "OPTIONS", origin=PAGE, **headers)
        assert answer.status == 204
        assert "access-control-allow-headers" not in answer.headers


@looped
async def test_a_host_that_is_not_served_is_refused_before_its_preflight(tmp_path: Path) -> None:
    async with served(tmp_path, allowed_origins=["*"], hosts=["hearth.example.com"]) as gateway:
        assert (await asked(gateway, PAGE))[0] == 421


@pytest.mark.parametrize(
    ("origin", "advice"),
    [
        ("app.example.com", "write scheme, host and port"),
        ("https://app.example.com/", "write scheme, host and port"),
        ("https://app.example.com/page", "write scheme, host and port"),
        ("https://App.example.com", "write scheme, host and port"),
        ("https://*.example.com", "write scheme, host and port"),
        ("null", "write scheme, host and port"),
        ("", "write scheme, host and port"),
        ("https://app.example.com:443", "write https://app.example.com"),
        ("http://localhost:80", "write http://localhost"),
    ],
)
def test_an_origin_that_no_browser_sends_is_refused_at_the_start_by_name(
    tmp_path: Path, origin: str, advice: str
) -> None:
    path = tmp_path / "hearth.toml"
    path.write_text(f"[server]\nallowed_origins = ['https://good.example', '{origin}']\n")
    with pytest.raises(SettingsError) as refused:
        load_config(path)
    assert repr(origin) in str(refused.value)
    assert advice in str(refused.value)


def test_origins_as_browsers_send_them_are_taken(tmp_path: Path) -> None:
    origins = ["*", PAGE, "http://localhost:3000", "http://[::1]:8080", "tauri://localhost", "http://192.168.1.7"]
    path = tmp_path / "hearth.toml"
    path.write_text(f"[server]\nallowed_origins = {origins}\n")
    assert load_config(path).server.allowed_origins == origins
