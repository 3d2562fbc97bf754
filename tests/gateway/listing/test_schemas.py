"""The schemas that are served say of a body what its reader does: valid is accepted, and accepted is valid, up to the
rules in `UNSAID`."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from gateway.api.routes import RUN_FAMILIES
from gateway.errors import ApiError
from gateway.listing import schemas
from tests.support.served_gateway import looped, served
from tests.support.stub_replica import MODEL

# What fields together must be, or what is inside their texts, which the schemas do not say. By what refuses it.
UNSAID = re.compile(
    r"'model' differs|goes with|go with|both say|say the same|send one|needs either|is missing; give|belongs to"
    r"|nested too deeply|are no JSON|is no JSON schema|not the text of a JSON|nothing is stored|is twice|is none of"
    r"|send 'text', or 'contexts'|more than \d+ bytes|only parts of type|tool_choice|the name|grammar|control char"
    r"|not valid base64|no data: URI|an 'image' needs"
)
# What asks for nothing that is not done anyway is accepted, whatever the schema says of the field.
NOTHING = (False, 0, "", [], {})
IDLE: dict[str, dict[str, Any]] = {
    "native": {"logprobs": NOTHING, "top_logprobs": NOTHING},
    "chat": {"prompt_cache_retention": ("in_memory", "in-memory")},
}
JUNK = st.sampled_from([None, True, 0, 1, -1, 3, 1.5, "", "x", "é" * 3, [], [1], ["x"], {}, {"x": 1}])


def bodies(family: str) -> st.SearchStrategy[dict[str, Any]]:
    """Bodies of some fields: mostly of the right kind, at the ends of their ranges and beyond, some of any kind."""
    schema = schemas.input_schema(family)
    fields = {name: values(one, schema["$defs"]) for name, one in schema["properties"].items()}
    fields["colour"] = JUNK
    main = st.sampled_from(MAIN[family]) | st.fixed_dictionaries({name: fields[name] for name in MAIN[family][0]})
    names = st.lists(st.sampled_from(sorted(fields)), max_size=2, unique=True)
    others = names.flatmap(lambda chosen: st.fixed_dictionaries({name: fields[name] for name in chosen}))
    junk = st.dictionaries(st.sampled_from(sorted(fields)), JUNK, max_size=1)
    return st.builds(lambda one, two, three: {**one, **two, **three}, main, others, st.just({}) | st.just({}) | junk)


TURNS = [{"role": "user", "content": "hello"}]
MAIN: dict[str, list[dict[str, Any]]] = {
    "native": [{"prompt": "hello"}, {"messages": TURNS}],
    "chat": [{"prompt": "hello"}, {"messages": TURNS}],
    "embeddings": [{"text": "hello"}, {"contexts": [{"text": "hello"}]}, {"queries": ["hello"], "documents": "hello"}],
    "rerank": [{"query": "hello", "contexts": [{"text": "hello"}]}],
}


def values(schema: dict[str, Any], definitions: dict[str, Any], depth: int = 4) -> st.SearchStrategy[Any]:
    """What a schema describes, and what is just beside it."""
    if "$ref" in schema:
        return values(definitions[schema["$ref"].rpartition("/")[2]], definitions, depth - 1)
    if "anyOf" in schema:
        return st.one_of([values(one, definitions, depth) for one in schema["anyOf"]])
    if "enum" in schema:
        return st.sampled_from([*schema["enum"], "other"])
    match schema.get("type"):
        case "null":
            return st.none()
        case "boolean":
            return st.booleans()
        case "integer" | "number":
            low, high = schema.get("minimum", schema.get("exclusiveMinimum", -5)), schema.get("maximum", 5)
            return st.sampled_from([low, high, low - 1, high + 1, (low + high) // 2])
        case "string":
            return st.sampled_from(_texts(schema))
        case "array":
            item = values(schema.get("items", {}), definitions, depth - 1) if depth > 0 else st.just("x")
            return st.lists(item, max_size=3)
        case "object":
            return _objects(schema, definitions, depth)
    return JUNK


def _texts(schema: dict[str, Any]) -> list[str]:
    low, high = schema.get("minLength", 0), min(schema.get("maxLength", 8), 2000)
    return ["a" * low, "b" * high, "c" * (high + 1), "d" * max(low - 1, 0), "get_weather", "é d"]


def _objects(schema: dict[str, Any], definitions: dict[str, Any], depth: int) -> st.SearchStrategy[Any]:
    if "properties" not in schema:
        keys = st.sampled_from(["1", "17", "x", "k" * 65])
        inner = schema.get("additionalProperties")
        return st.dictionaries(
            keys, values(inner, definitions, depth - 1) if isinstance(inner, dict) else JUNK, max_size=2
        )
    if depth <= 0:
        return st.just({})
    of = {name: values(one, definitions, depth - 1) for name, one in schema["properties"].items()}
    needed = {name: of[name] for name in schema.get("required", ())}
    chosen = st.lists(st.sampled_from(sorted(of)), max_size=2, unique=True)
    return chosen.flatmap(lambda names: st.fixed_dictionaries({**needed, **{name: of[name] for name in names}}))


@pytest.mark.parametrize("family", sorted(RUN_FAMILIES))
def test_what_the_schema_allows_is_accepted_and_nothing_else(family: str) -> None:
    schema = schemas.input_schema(family)
    Draft202012Validator.check_schema(schema)
    validator = Draft202012Validator(schema)
    seen = {"both": 0, "neither": 0, "unsaid": 0}

    @settings(max_examples=600, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None)
    @given(bodies(family))
    def agree(body: dict[str, Any]) -> None:
        problem = refused(family, body)
        idle = IDLE.get(family, {})
        said = {name: value for name, value in body.items() if not (name in idle and value in idle[name])}
        valid = validator.is_valid(said)
        if valid and problem and UNSAID.search(problem):
            seen["unsaid"] += 1
            return
        assert valid == (problem is None), (problem, [error.message for error in validator.iter_errors(said)][:3])
        seen["both" if valid else "neither"] += 1

    agree()
    print(family, seen)
    assert min(seen["both"], seen["neither"]) > 60, seen


def refused(family: str, body: dict[str, Any]) -> str | None:
    try:
        RUN_FAMILIES[family](json.dumps(body).encode(), b"", MODEL, 0)
    except ApiError as refusal:
        return refusal.message
    return None


@looped
async def test_a_models_schemas_are_those_of_its_dialect(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        for below in ("/ai", f"/client/v4/accounts/{gateway.account_id}/ai"):
            said = (await gateway.call(f"{below}/models/schema?model={MODEL}", b"", "GET")).json["result"]
            asked = schemas.with_sampling(schemas.input_schema("native"), "native", {})
            assert said["input"] == json.loads(json.dumps(asked))
            answer = await gateway.run(prompt="hello", max_tokens=2)
            Draft202012Validator(said["output"]).validate(answer.json["result"])
        for query, code in (("", 5006), ("?model=nothing", 5007), ("?model=x&more=1", 5006)):
            answer = await gateway.call(f"/ai/models/schema{query}", b"", "GET")
            assert (answer.status, answer.code) == (400, code)


@pytest.mark.parametrize("family", sorted(RUN_FAMILIES))
def test_every_family_says_what_clients_look_for_at_the_top(family: str) -> None:
    for schema in (schemas.input_schema(family), schemas.output_schema(family)):
        assert schema["type"] == "object"
        assert isinstance(schema["additionalProperties"], bool)
        assert schema["description"]


def test_a_models_own_sampling_is_what_its_schema_states_as_defaults_but_for_the_native_temperature() -> None:
    def defaults(family: str, own: dict[str, float]) -> dict[str, float]:
        fields = schemas.with_sampling(schemas.input_schema(family), family, own)["properties"]
        return {name: field["default"] for name, field in fields.items() if "default" in field}

    own = {"temperature": 0.2, "top_k": 20, "min_p": 0.05}
    assert defaults("chat", own) == {**defaults("chat", {}), **own}
    assert defaults("native", own) == {**defaults("native", {}), **own, "temperature": 0.6}
    assert (defaults("chat", {})["temperature"], defaults("native", {})["temperature"]) == (1.0, 0.6)
    assert defaults("embeddings", own) == {}
