"""Words for what a field of a typed body or of a settings file may be: for messages that say what to write.

It reads types, and knows no requests and no files.
"""

import difflib
import re
from typing import Any, Final

from msgspec import inspect

STEP: Final = re.compile(r"\[[^\]]*\]|[^.\[]+")


def allowed_words(kind: Any, path: str) -> list[str]:
    """The words that a field like `messages[0].role` of this type may be."""
    kinds = _at(kind, path)
    return sorted(str(word) for kind in kinds if isinstance(kind, inspect.LiteralType) for word in kind.values if word)


def similar_field(kind: Any, path: str, name: str) -> str:
    """The field of the object at this path that the name was most likely meant to be; empty where none is like it."""
    known = [field.encode_name for inner in _at(kind, path) for field in getattr(inner, "fields", ())]
    return next(iter(difflib.get_close_matches(name, known, 1, 0.75)), "")


def allowed_ranges(kind: Any, path: str) -> str:
    """The numbers, lengths and sizes that the field may have, like `a number from 0 to 2`; empty without a bound."""
    ranges = [words for kind in _at(kind, path) if (words := _range(kind))]
    return " or ".join(dict.fromkeys(ranges))


def description_of(kind: Any, path: str) -> str:
    """The line of documentation of the field at this path; empty where it has none."""
    outer, _, name = path.rpartition(".")
    fields = [
        field for inner in _at(kind, outer) for field in getattr(inner, "fields", ()) if field.encode_name == name
    ]
    schemas = [field.type.extra_json_schema or {} for field in fields if isinstance(field.type, inspect.Metadata)]
    return str(next((schema["description"] for schema in schemas if "description" in schema), ""))


def union_members(kinds: list[inspect.Type]) -> list[inspect.Type]:
    """The types without their metadata, each union split into its members."""
    plain: list[inspect.Type] = []
    for kind in kinds:
        match kind:
            case inspect.Metadata(type=inner):
                plain += union_members([inner])
            case inspect.UnionType(types=several):
                plain += union_members(list(several))
            case _:
                plain.append(kind)
    return plain


def _at(kind: Any, path: str) -> list[inspect.Type]:
    kinds = union_members([inspect.type_info(kind)])
    for step in STEP.findall(path):
        kinds = union_members([inner for kind in kinds for inner in _inside(kind, step)])
    return kinds


def _inside(kind: inspect.Type, step: str) -> list[inspect.Type]:
    if isinstance(kind, inspect.StructType):
        if kind.tag_field == step:
            return [inspect.LiteralType((kind.tag,))]
        return [field.type for field in kind.fields if field.encode_name == step]
    if isinstance(kind, inspect.ListType) and step.startswith("["):
        return [kind.item_type]
    return [kind.value_type] if isinstance(kind, inspect.DictType) and step.startswith("[") else []


def _range(kind: inspect.Type) -> str:
    match kind:
        case inspect.IntType() | inspect.FloatType():
            name = "a whole number" if isinstance(kind, inspect.IntType) else "a number"
            return _bounded(name, kind)
        case inspect.StrType(min_length=low, max_length=high) if high is not None:
            return f"a text of {_upto(low, high)} characters"
        case inspect.StrType(min_length=low) if low:
            return "a text that is not empty"
        case inspect.ListType(min_length=low, max_length=high) if high is not None:
            return f"a list of {_upto(low, high)}"
        case inspect.DictType(max_length=high) if high is not None:
            return f"an object of at most {high} entries"
        case _:
            return ""


def _upto(low: int | None, high: int) -> str:
    return f"{low} to {high}" if low else f"at most {high}"


def _bounded(name: str, kind: inspect.IntType | inspect.FloatType) -> str:
    bounds = (("from", kind.ge), ("above", kind.gt), ("to", kind.le), ("below", kind.lt))
    words = [f"{word} {int(bound) if bound == int(bound) else bound}" for word, bound in bounds if bound is not None]
    return " ".join([name, *words]) if words else ""
