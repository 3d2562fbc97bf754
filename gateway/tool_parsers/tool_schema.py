"""Which tools a model may call, and types and schemas of their parameters, for grammars and parsers of calls.

It reads JSON schemas and knows no format.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from gateway.errors import ApiError, bad_input

FunctionSpec = Mapping[str, Any]  # `function` of a tool in OpenAI's shape: name, description, parameters
Schema = Mapping[str, Any]

ANNOTATIONS: Final = frozenset(
    {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "$schema"}
)
_TYPE_NAMES: Final[Mapping[type, str]] = {
    type(None): "null",
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
}
TYPES: Final = frozenset(_TYPE_NAMES.values())
_DEFINITIONS: Final = frozenset({"$defs", "definitions"})
_PLAIN: Final = ANNOTATIONS | _DEFINITIONS | {"type", "properties", "required", "additionalProperties"}
_REFERENCES_MAX: Final = 8


@dataclass(frozen=True, slots=True)
class ToolSelection:
    """Whether the model calls tools: as it likes (auto), not at all (none), at least once (required), or this one."""

    mode: Literal["auto", "none", "required", "named"] = "auto"
    name: str | None = None


@dataclass(frozen=True, slots=True)
class ToolParameter:
    """One parameter. `schema` stands alone: it has the definitions that it may refer to."""

    name: str
    schema: Schema
    required: bool


def offered_functions(tools: Sequence[Mapping[str, Any]], choice: ToolSelection) -> dict[str, FunctionSpec]:
    """The tools that may be called, by name."""
    functions = [tool["function"] for tool in tools]
    if choice.mode == "none":
        return {}
    return {f["name"]: f for f in functions if choice.mode != "named" or f["name"] == choice.name}


def arguments(function: FunctionSpec) -> Schema:
    """The schema of all arguments, as a grammar has it. Raises ApiError where they could be no object.

    Where only named properties are described, only these may be written: an answer would be as valid with others, but a
    small model would not stop to invent some.
    """
    schema: Schema = function.get("parameters") or {}
    if "object" not in _types_of(schema.get("type"), "object"):
        raise tool_schema_error(function, "'type' must be 'object'")
    schema = {**schema, "type": "object"}
    schemas, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(schemas, dict) or not all(isinstance(inner, dict | bool) for inner in schemas.values()):
        raise tool_schema_error(function, "'properties' must be schemas by name")
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise tool_schema_error(function, "'required' must be a list of names")
    if "properties" in schema and schema.keys() <= _PLAIN and set(required) <= schemas.keys():
        schema = {"additionalProperties": False, **schema}
    return schema


def properties(function: FunctionSpec, name: re.Pattern[str]) -> list[ToolParameter]:
    """The parameters one by one, for formats that write them so. Raises ApiError where a schema says more of them than
    that, which such a format cannot hold to, and for a name that is empty or unlike the pattern."""
    schema = arguments(function)
    unknown = sorted(schema.keys() - _PLAIN)
    if unknown:
        raise tool_schema_error(
            function, f"{unknown[0]!r} beside 'properties' cannot be kept in this model's format of calls"
        )
    required = set(schema.get("required", ()))
    schemas = {key: inner for key, inner in schema.get("properties", {}).items() if inner is not False}
    if not required <= set(schemas):
        raise tool_schema_error(
            function, f"'required' names {min(required - set(schemas))!r}, which is not in 'properties'"
        )
    for key in schemas:
        if not key or name.fullmatch(key) is None:
            raise tool_schema_error(
                function, f"{key!r} cannot be written as a parameter in this model's format of calls"
            )
    return [ToolParameter(key, _alone(inner, schema), key in required) for key, inner in schemas.items()]


def schema_types(schema: Schema) -> frozenset[str]:
    """The JSON types that a value may have, as far as the schema says it at once; all of them where it does not."""
    root = schema
    for _ in range(_REFERENCES_MAX):
        if "type" in schema:
            return _types_of(schema["type"])
        if "const" in schema or isinstance(schema.get("enum"), list):
            values = [schema["const"]] if "const" in schema else schema["enum"]
            return _types_of([json_type_of(value) for value in values])
        branches = schema.get("anyOf", schema.get("oneOf"))
        if isinstance(branches, list):
            return _union(branches)
        pointed = _pointed(root, schema.get("$ref"))
        if pointed is None:
            break
        schema = pointed
    return TYPES


def json_type_of(value: Any) -> str:
    """The JSON type of a value that was JSON."""
    return _TYPE_NAMES[type(value)]


def types_by_name(function: FunctionSpec) -> dict[str, frozenset[str]]:
    """The types of the parameters that the schema names. It refuses nothing."""
    schema: Schema = function.get("parameters") or {}
    schemas = schema.get("properties")
    if not isinstance(schemas, dict):
        return {}
    return {name: schema_types(_alone(inner, schema)) for name, inner in schemas.items()}


def tool_schema_error(function: FunctionSpec, problem: str) -> ApiError:
    name = str(function["name"])
    return bad_input(f"'tools': the parameters of {name!r} are not supported here: {problem}", "tools")


def _alone(inner: Any, root: Schema) -> Schema:
    """One of the schemas in a schema, with the definitions that it may refer to."""
    if not isinstance(inner, dict):
        return {}
    return {**{key: root[key] for key in _DEFINITIONS & root.keys()}, **inner} if "$ref" in str(inner) else inner


def _types_of(types: Any, default: str | None = None) -> frozenset[str]:
    if types is None:
        return frozenset({default}) if default else TYPES
    known = TYPES & frozenset(kind for kind in (types if isinstance(types, list) else [types]) if isinstance(kind, str))
    return known | {"integer"} if "number" in known else known


def _union(branches: list[Any]) -> frozenset[str]:
    """The types of all branches; any type where a branch names none."""
    kinds = [_types_of(branch.get("type")) if isinstance(branch, dict) else TYPES for branch in branches]
    return frozenset().union(*kinds)


def _pointed(root: Schema, reference: Any) -> Schema | None:
    """Resolves a reference into the schema's own definitions."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    resolved: Any = root
    for step in reference[2:].split("/"):
        resolved = resolved.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(resolved, dict) else None
    return resolved if isinstance(resolved, dict) else None
