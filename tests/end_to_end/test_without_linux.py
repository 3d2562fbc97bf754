"""Hearth where all is missing that only Linux has: it serves, streams, holds answers to schemas, and ends."""

import os
import signal
from pathlib import Path

from tests.end_to_end.conftest import EMBER, serving
from tests.support.waiting import wait_for

FAKE = Path(__file__).parent / "without_linux"


def test_a_whole_server_runs_without_what_linux_alone_has(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(FAKE)}
    with serving(tmp_path, environment=environment) as hearth, hearth.client() as client:
        asked = {"messages": [{"role": "user", "content": "Hello! Who are you?"}], "max_tokens": 40, "temperature": 0}
        said = client.post("/v1/chat/completions", json={"model": EMBER, **asked})
        assert said.status_code == 200, said.text
        assert said.json()["choices"][0]["message"]["content"].strip()
        schema = {"type": "json_schema", "json_schema": {"type": "object", "properties": {"a": {"type": "integer"}},
                  "required": ["a"], "additionalProperties": False}}  # fmt: skip
        held = client.post("/v1/chat/completions", json={"model": EMBER, **asked, "response_format": schema})
        assert held.json()["choices"][0]["message"]["content"].startswith("{"), held.text
        streamed = client.post(f"/ai/run/{EMBER}", json={**asked, "stream": True})
        assert streamed.text.endswith("data: [DONE]\n\n")
        running = hearth.processes()
        assert not any("engine.replica.zygote" in " ".join(process.cmdline()) for process in running), "Linux's own"
        hearth.process.send_signal(signal.SIGINT)
        gone = ("zombie", "dead")
        wait_for(lambda: all(not each.is_running() or each.status() in gone for each in running), 30, "all have ended")
