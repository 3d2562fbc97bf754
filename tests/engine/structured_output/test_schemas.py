"""A sample of the JSON Schema Test Suite: what random logits write under each schema, jsonschema accepts. All of it, in
all drafts, is counted by benchmarks/scheduling/structured_output.py."""

import json
from pathlib import Path

from engine.structured_output.manager import StructuredOutputManager
from tests.engine.structured_output.texts import Judgement, Scribe, compiled, judge

SAMPLE = json.loads(Path(__file__).with_name("schemas.json").read_text())["cases"]


def test_what_is_written_under_a_schema_is_accepted_and_what_is_not_supported_is_named(
    scribe: Scribe, grammars: StructuredOutputManager
) -> None:
    judged = {}
    for case in SAMPLE:
        compilation = compiled(grammars, json.dumps(case["schema"]), cache=False)
        judged[case["from"], case["description"]] = judge(scribe, case["schema"], compilation, seeds=2)
    assert {case: each.told for case, each in judged.items() if each.judgement == Judgement.WRONG} == {}
    assert sum(each.judgement == Judgement.ACCEPTED for each in judged.values()) > 0.4 * len(judged)
    for each in judged.values():
        assert (each.judgement == Judgement.REFUSED) == bool(each.told)
        assert "\n" not in each.told
