"""Files for browsers: compressed, asked about each time, and with a policy that loads nothing from elsewhere."""

import gzip
import json
from pathlib import Path

from gateway.admin.openapi import openapi_document
from gateway.admin.table import OPERATIONS, ROUTES
from tests.support.served_gateway import looped, served

DOCS = Path(__file__).parents[3] / "gateway" / "admin" / "docs"


@looped
async def test_the_page_of_the_api_and_its_files_are_served_without_a_token(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        names = {
            "/docs": "index.html",
            "/docs/": "index.html",
            **{f"/docs/{path.name}": path.name for path in DOCS.iterdir()},
        }
        assert len(names) == 5
        for path, name in names.items():
            answer = await gateway.call(path, b"", "GET", authorization="")
            assert answer.status == 200, path
            assert answer.content == (DOCS / name).read_bytes()
            policy = answer.headers["content-security-policy"]
            assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
            assert "unsafe" not in policy
            assert "//" not in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
        assert (await gateway.call("/docs/nothing.js", b"", "GET", authorization="")).status == 404
        assert (await gateway.call("/docs", b"", "POST", authorization="")).status == 405


def test_no_file_names_another_host_or_holds_script_or_style_in_the_page() -> None:
    for path in DOCS.iterdir():
        text = path.read_text()
        assert "http://" not in text, path
        assert "https://" not in text, path
        assert "innerHTML" not in text, path
        assert " style=" not in text, path
        assert " on" + "click=" not in text, path


@looped
async def test_a_browser_gets_it_compressed_and_only_once(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        whole = await gateway.call("/client/v4/openapi.json", b"", "GET", authorization="")
        packed = await gateway.call("/client/v4/openapi.json", b"", "GET", accept_encoding="br, gzip")
        assert packed.headers["content-encoding"] == "gzip"
        assert gzip.decompress(packed.content) == whole.content
        assert len(packed.content) < len(whole.content) / 5
        assert json.loads(whole.content) == json.loads(json.dumps(openapi_document(OPERATIONS, ROUTES)))
        etag = whole.headers["etag"]
        client = await gateway.client()
        await client.send("GET", "/client/v4/openapi.json", b"", {"if-none-match": etag})
        assert await client.head() == 304
        assert "content-length" not in client.headers
        await client.send("GET", "/version", b"")
        assert await client.head() == 200, "the connection goes on behind an answer without a body"
        client.leave()
