"""The reference of hearth.toml: every setting with its default and its line of documentation. It reads no file."""

from collections.abc import Iterator

import msgspec

from gateway.settings.config import Config


def settings(section: type[msgspec.Struct] = Config, prefix: str = "") -> Iterator[tuple[str, object, str]]:
    """Every setting as (key, default, what it is), in the order of the file. A required one has `...`."""
    for field in msgspec.structs.fields(section):
        kind, description = msgspec.inspect.type_info(field.type), ""
        if isinstance(kind, msgspec.inspect.Metadata):
            description = (kind.extra_json_schema or {}).get("description", "")
            kind = kind.type
        if isinstance(kind, msgspec.inspect.ListType):
            kind = kind.item_type
        if isinstance(kind, msgspec.inspect.StructType):
            yield from settings(kind.cls, f"{prefix}{field.name}.")
            continue
        default = ... if field.default is msgspec.NODEFAULT else field.default
        if field.default_factory is not msgspec.NODEFAULT:
            default = field.default_factory()
        yield prefix + field.name, default, description


def describe() -> str:
    """hearth.toml in words: one line per setting."""
    lines = []
    for key, default, description in settings():
        text = "required" if default is ... else "unset" if default is None else repr(default)
        lines.append(f"  {key:28} {description} [{text}]")
    return "\n".join(lines)
