"""Schemathesis, which knows nothing but the document, against the whole API over a socket."""

import asyncio
import re
import sys
from pathlib import Path

import pytest

from tests.support.admin_api import EVERYTHING, served_admin
from tests.support.served_gateway import looped

# Left out are the checks that valid data is accepted, for schemas cannot say all (a limit below its ceiling, a time to
# come), and that a token of the wrong shape is answered with 401: here it is 400, as with Cloudflare.
CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,response_headers_conformance,"
    "response_schema_conformance,negative_data_rejection,unsupported_method,allow_header_conformance"
)
# The token's own account for its own paths, another for the operator's, that may be suspended; and nothing else.
SETTINGS = """
[parameters]
"path.account_id" = "{own}"
"path.model" = "@cf%2Ftest%2Fstub"

[[operations]]
include-path-regex = "/operator/"
parameters = {{ "path.account_id" = "{other}" }}
"""


# Which paths, how they are tried, and how often by chance. What lies below an account is also served without it, from
# the same description: there a few tries show that it is the same that answers.
GROUPS = {
    "administration": ("^/client/(?!.*/ai/)|^/[dhmr]|^/version", "coverage,fuzzing", 6),
    "inference": ("^/client/v4/accounts/.*/ai/", "fuzzing", 6),
    "by token alone": ("^/(ai|v1)/", "fuzzing", 4),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("group", GROUPS)
@looped
async def test_whatever_is_sent_is_answered_as_the_document_says(tmp_path: Path, group: str) -> None:
    paths, phases, tries = GROUPS[group]
    async with served_admin(tmp_path) as house:
        token = await house.token(*EVERYTHING)
        (tmp_path / "schemathesis.toml").write_text(SETTINGS.format(own=house.ann_id, other=house.bob_id))
        process = await asyncio.create_subprocess_exec(
            str(Path(sys.executable).with_name("st")),
            *("--config-file", str(tmp_path / "schemathesis.toml"), "--no-color"),
            *("run", f"{house.gateway.base_url}/client/v4/openapi.json"),
            *("--header", f"Authorization: Bearer {token}", "--checks", CHECKS, "--seed", "1"),
            *("--phases", phases, "--max-examples", str(tries), "--no-shrink", "--continue-on-failure"),
            *("--suppress-health-check", "all", "--warnings", "off", "--include-path-regex", paths),
            cwd=tmp_path,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        said, _ = await process.communicate()
        assert process.returncode == 0, said.decode()
        print(said.decode()[-600:])


@looped
async def test_the_groups_leave_no_path_out(tmp_path: Path) -> None:
    async with served_admin(tmp_path) as house:
        for path in house.document.content["paths"]:
            assert sum(bool(re.search(paths, path)) for paths, _, _ in GROUPS.values()) == 1, path
