"""A conversation put together from its pieces: reasoning, texts and tool calls of one turn, and results.

It makes the turns that a chat template reads, and does not know the shape that any dialect gives its pieces.
"""

from typing import Any

from gateway.api.message_fields import Call, ToolCall, tool_call
from gateway.errors import bad_input


class ConversationBuilder:
    """Turns in the making. An assistant's reasoning, calls and the text between them belong to one turn."""

    def __init__(self) -> None:
        self.turns: list[dict[str, Any]] = []
        self._thoughts: list[str] = []  # of an assistant's turn that has not begun yet
        self._names: dict[str, str] = {}  # of tools, by the ids of calls

    def add_text(self, role: str, text: str) -> None:
        if role != "assistant":
            self._thoughts.clear()
            self.turns.append({"role": "system" if role == "developer" else role, "content": text})
            return
        turn = self._open
        if turn is None or turn["content"] or "tool_calls" in turn:
            turn = self._begin()
        turn["content"] = text

    def add_parts(self, role: str, parts: list[dict[str, str]]) -> None:
        """Adds a turn of texts and images, which is nobody's but a user's."""
        self._thoughts.clear()
        self.turns.append({"role": role, "content": parts})

    def add_reasoning(self, text: str) -> None:
        """Adds the reasoning before the assistant's next text or call; it is left out if nothing follows."""
        self._thoughts.append(text)

    def add_call(self, id: str, name: str, arguments: str | dict[str, Any], place: str) -> None:
        """Adds a tool call. Raises ApiError for arguments that are no JSON, and for an id that another call has."""
        if id in self._names:
            raise bad_input(f"'{place}': another call has this id; give each its own", place)
        self._names[id] = name
        turn = self._open or self._begin()
        turn.setdefault("tool_calls", []).append(tool_call(ToolCall(id, function=Call(name, arguments)), place))

    def add_result(self, id: str, text: str, place: str) -> None:
        """Adds the result of a call. Raises ApiError if there is no such call."""
        if id not in self._names:
            raise bad_input(f"'{place}' is the id of no call before it; send the call too", place)
        self._thoughts.clear()
        self.turns.append({"role": "tool", "content": text, "tool_call_id": id, "name": self._names[id]})

    @property
    def _open(self) -> dict[str, Any] | None:
        """The assistant's turn that further pieces belong to, if there is one."""
        last = self.turns[-1] if self.turns and not self._thoughts else None
        return last if last is not None and last["role"] == "assistant" else None

    def _begin(self) -> dict[str, Any]:
        turn: dict[str, Any] = {"role": "assistant", "content": ""}
        if self._thoughts:
            turn["reasoning_content"] = "".join(self._thoughts)
            self._thoughts.clear()
        self.turns.append(turn)
        return turn
