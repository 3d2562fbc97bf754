"""`tool_choice` in all its spellings, against the tools that there are.

It knows neither models nor how they write calls.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from gateway.errors import bad_input
from gateway.inference.prompt import TOOLS_MAX, ToolName
from gateway.tool_parsers.types import ToolSelection


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


ToolChoiceField = Literal["none", "auto", "required"] | ChosenTool


def select_tools(
    tools: list[dict[str, Any]] | None, asked: ToolChoiceField | None
) -> tuple[list[dict[str, Any]] | None, ToolSelection]:
    """The tools that the model is told of, and whether it calls them. Raises Refusal."""
    if isinstance(asked, ChosenTool):
        return _chosen(tools, asked)
    choice = ToolSelection(asked or "auto")
    if choice.mode == "required" and not tools:
        raise bad_input("'tool_choice' is 'required' and there are no 'tools'; send some", "tool_choice")
    return (None if choice.mode == "none" else tools), choice


def named_tool(tools: list[dict[str, Any]] | None, name: str, field: str) -> ToolSelection:
    """Exactly this tool. Raises Refusal where it is none of them."""
    names = [tool["function"]["name"] for tool in tools or []]
    if name not in names:
        raise bad_input(f"'{field}': {name!r} is none of the 'tools'; name one of them", field)
    return ToolSelection("named", name)


def _chosen(tools: list[dict[str, Any]] | None, asked: ChosenTool) -> tuple[list[dict[str, Any]] | None, ToolSelection]:
    if asked.type == "function":
        if asked.allowed_tools is not None:
            raise bad_input("'tool_choice.allowed_tools' goes with the type 'allowed_tools'", "tool_choice")
        return tools, named_tool(tools, _name_of(asked, "tool_choice"), "tool_choice")
    if asked.allowed_tools is None or asked.function is not None or asked.name is not None:
        raise bad_input("'tool_choice' of the type 'allowed_tools' has 'allowed_tools' alone", "tool_choice")
    allowed = {
        _name_of(one, f"tool_choice.allowed_tools.tools[{i}]") for i, one in enumerate(asked.allowed_tools.tools)
    }
    for name in allowed:
        named_tool(tools, name, "tool_choice")
    left = [tool for tool in tools or [] if tool["function"]["name"] in allowed]
    return left, ToolSelection(asked.allowed_tools.mode)


def _name_of(one: ChosenTool | AllowedTool, place: str) -> str:
    if (one.function is None) == (one.name is None):
        raise bad_input(f"'{place}' needs either 'function' with its 'name', or 'name'", place)
    return one.name if one.function is None else one.function.name  # type: ignore[return-value]
