"""What an earlier version wrote: tests/compatibility/files, made at commit 081ac50 by that commit's own code.

facts.json has the ids, the token texts and the clock of both stores, which were filled by the same calls. The Redis
content is the commands that make it, as JSON with one character a byte, without the expiry times.
"""

import json
from pathlib import Path
from typing import Any

import pytest

FILES = Path(__file__).parent / "files"


@pytest.fixture(scope="session")
def facts() -> dict[str, Any]:
    document: dict[str, Any] = json.loads((FILES / "facts.json").read_text())
    return document
