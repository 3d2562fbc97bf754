"""One call is one trace through gateway and replica, sent over OTLP, with nothing in it of what was said."""

import re
from pathlib import Path

from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.end_to_end.conftest import EMBER, Hearth, serving
from tests.support.otlp_collector import collecting
from tests.support.waiting import wait_for

SYSTEM = "You are the desk of Quillfeather House. The access code of the attic is 70417."
QUESTION = "What is the access code of the attic?"
REPLICA = {"replica.queue", "replica.prefill", "replica.decode"}


def ask(hearth: Hearth) -> str:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
    with hearth.client() as client:
        said = client.post(f"/ai/run/{EMBER}", json={"messages": messages, "max_tokens": 24, "temperature": 0})
    assert said.status_code == 200, said.text
    text: str = said.json()["result"]["response"]
    return text


def counts(span: Span) -> dict[str, int]:
    return {item.key: item.value.int_value for item in span.attributes if item.value.HasField("int_value")}


def test_a_call_is_one_trace_through_gateway_and_replica_without_its_content(tmp_path: Path) -> None:
    with collecting() as collector:
        settings = f'[telemetry]\notlp_url = "{collector.url}"\nservice = "lodge"\n'
        with serving(tmp_path, settings) as hearth:
            answer = ask(hearth)
            account, token = hearth.account_id, hearth.token
            wait_for(lambda: len(collector.spans()) >= 4, 20, "the spans of gateway and replica")
        spans = collector.spans()
        payload = b"".join(collector.bodies)
    assert len(spans) == 4, [span.name for _, span in spans]
    (above,) = [span for service, span in spans if service == "lodge"]
    below = {span.name: span for service, span in spans if service == "lodge-replica"}
    assert above.name == f"chat {EMBER}"
    assert set(below) == REPLICA
    assert {span.trace_id for span in below.values()} == {above.trace_id}
    assert {span.parent_span_id for span in below.values()} == {above.span_id}
    assert above.start_time_unix_nano <= min(span.start_time_unix_nano for span in below.values())

    seen, read, wrote = counts(above), counts(below["replica.prefill"]), counts(below["replica.decode"])
    assert read["gen_ai.usage.input_tokens"] == seen["gen_ai.usage.input_tokens"] > 20
    assert wrote["gen_ai.usage.output_tokens"] == seen["gen_ai.usage.output_tokens"] > 0

    words = {word for word in re.findall(r"\w+", f"{SYSTEM} {QUESTION} {answer}") if len(word) > 4}
    assert {"Quillfeather", "70417"} <= words
    for secret in (*words, SYSTEM, QUESTION, answer, account, token):
        assert secret.encode() not in payload, secret
