"""Tools and `tool_choice` in all their spellings, and what a prompt gets of them.

It knows neither models nor how they write calls.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from gateway.errors import bad_input
from gateway.http.json_body import check_depth
from gateway.tool_parsers.tool_schema import ToolSelection

TOOLS_MAX: Final = 128
TOOLS_BYTES_MAX: Final = 128 << 10
SCHEMA_DEPTH_MAX: Final = 16

ToolName = Annotated[str, Meta(pattern="^[A-Za-z0-9_.:/-]{1,128}$(?!\\n)")]


class Function(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tool, flat (native) or as `function` (OpenAI)."""

    type: Literal["function"] | None = None
    function: Function | None = None
    name: ToolName | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Named(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tool by its name."""

    name: ToolName


class AllowedTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["function"] = "function"
    function: Named | None = None
    name: ToolName | None = None


class Allowed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """OpenAI's `allowed_tools`: some of the tools, and whether one must be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedTool], Meta(min_length=1, max_length=TOOLS_MAX)]


class ChosenTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`tool_choice` as an object: one function, flat or as `function`, or some that are allowed."""

    type: Literal["function", "allowed_tools"] = "function"
    function: Named | None = None
    name: ToolName | None = None
    allowed_tools: Allowed | None = None


Tools = Annotated[list[Tool], Meta(max_length=TOOLS_MAX)]
ToolChoiceField = Literal["none", "auto", "required"] | ChosenTool


def select_tools(
    tools: list[dict[str, Any]] | None, choice: ToolChoiceField | None
) -> tuple[list[dict[str, Any]] | None, ToolSelection]:
    """The tools that the model sees, and whether it calls them. Raises ApiError."""
    if isinstance(choice, ChosenTool):
        return _chosen(tools or [], choice)
    selection = ToolSelection(choice or "auto")
    if selection.mode == "required" and not tools:
        raise bad_input("'tool_choice' is 'required' and there are no 'tools'; send some", "tool_choice")
    return (None if selection.mode == "none" else tools), selection


def _chosen(tools: list[dict[str, Any]], choice: ChosenTool) -> tuple[list[dict[str, Any]], ToolSelection]:
    if choice.type == "function":
        if choice.allowed_tools is not None:
            raise bad_input("'tool_choice.allowed_tools' goes with the type 'allowed_tools'", "tool_choice")
        return tools, ToolSelection("named", _name_in(tools, choice, "tool_choice"))
    if choice.allowed_tools is None or choice.function is not None or choice.name is not None:
        raise bad_input("'tool_choice' of the type 'allowed_tools' has 'allowed_tools' alone", "tool_choice")
    allowed = {
        _name_in(tools, tool, f"tool_choice.allowed_tools.tools[{i}]")
        for i, tool in enumerate(choice.allowed_tools.tools)
    }
    return [tool for tool in tools if tool["function"]["name"] in allowed], ToolSelection(choice.allowed_tools.mode)


def _name_in(tools: list[dict[str, Any]], choice: ChosenTool | AllowedTool, place: str) -> str:
    """The name that is chosen. Raises ApiError where none of the tools has it."""
    if (choice.function is None) == (choice.name is None):
        raise bad_input(f"'{place}' needs either 'function' with its 'name', or 'name'", place)
    name = (choice.function or choice).name
    assert name is not None
    if all(tool["function"]["name"] != name for tool in tools):
        raise bad_input(f"'tool_choice': {name!r} is none of the 'tools'; name one of them", "tool_choice")
    return name


def prompt_tools(tools: Sequence[Tool] | None, choice: ToolChoiceField | None, parallel: bool | None) -> dict[str, Any]:
    """The fields of a Prompt with these tools. `parallel` False allows one call in an answer. Raises ApiError."""
    definitions, selection = select_tools(tool_definitions(tools), choice)
    return {
        "tools": definitions,
        "tool_choice": selection,
        "parallel_calls": parallel is not False,
        "strict_calls": any(tool.strict or (tool.function and tool.function.strict) for tool in tools or ()),
    }


def tool_definitions(tools: Sequence[Tool] | None) -> list[dict[str, Any]] | None:
    """The tools in OpenAI's shape, which chat templates read; None without tools. Raises ApiError."""
    if not tools:
        return None
    whole = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)]
    names = [tool["function"]["name"] for tool in whole]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise bad_input(f"'tools[{i}]': {name!r} is there twice; give each tool a name of its own", f"tools[{i}]")
    if len(msgspec.json.encode(whole)) > TOOLS_BYTES_MAX:
        raise bad_input(f"'tools' has more than {TOOLS_BYTES_MAX} bytes; shorten the schemas", "tools")
    return whole


def _tool(tool: Tool, place: str) -> dict[str, Any]:
    if (tool.name is None) == (tool.function is None):
        raise bad_input(f"'{place}' needs either 'function' or 'name' with 'description' and 'parameters'", place)
    function = tool.function or tool
    check_depth(function.parameters, f"{place}.parameters", SCHEMA_DEPTH_MAX)
    parameters = function.parameters or {"type": "object", "properties": {}}
    described = {"name": function.name, "description": function.description or "", "parameters": parameters}
    return {"type": "function", "function": described}
