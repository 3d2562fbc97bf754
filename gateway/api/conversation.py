"""Puts a conversation together from what dialects send in pieces: thoughts, texts and calls of one turn, and results.

It makes the turns that a chat template reads, and does not know the shape that any dialect gives its pieces.
"""

from typing import Any

from gateway.api.message_fields import Call, ToolCall, tool_call
from gateway.errors import bad_input


class ConversationBuilder:
    """Turns in the making. An assistant's thoughts and calls belong to one turn with the text between them."""

    def __init__(self) -> None:
        self.turns: list[dict[str, Any]] = []
        self._thoughts: list[str] = []  # of an assistant's turn that has not come yet
        self._called: dict[str, str] = {}  # names by the ids of calls

    def say(self, role: str, text: str) -> None:
        if role != "assistant":
            self._thoughts.clear()
            self.turns.append({"role": "system" if role == "developer" else role, "content": text})
            return
        turn = self._open
        if turn is None or turn["content"] or "tool_calls" in turn:
            turn = self._begin()
        turn["content"] = text

    def think(self, text: str) -> None:
        """What the assistant reasoned before what it says next. It is left out where nothing follows."""
        self._thoughts.append(text)

    def call(self, id: str, name: str, arguments: str | dict[str, Any], place: str) -> None:
        """Raises Refusal for arguments that are no JSON, and for an id that another call has."""
        if id in self._called:
            raise bad_input(f"'{place}': another call has this id; give each its own", place)
        self._called[id] = name
        turn = self._open or self._begin()
        turn.setdefault("tool_calls", []).append(tool_call(ToolCall(id, function=Call(name, arguments)), place))

    def result(self, id: str, text: str, place: str) -> None:
        """What a call gave. Raises Refusal where there was none."""
        if id not in self._called:
            raise bad_input(f"'{place}' is the id of no call before it; send the call too", place)
        self._thoughts.clear()
        self.turns.append({"role": "tool", "content": text, "tool_call_id": id, "name": self._called[id]})

    @property
    def _open(self) -> dict[str, Any] | None:
        """The assistant's turn that more of it belongs to, where there is one."""
        last = self.turns[-1] if self.turns and not self._thoughts else None
        return last if last is not None and last["role"] == "assistant" else None

    def _begin(self) -> dict[str, Any]:
        turn: dict[str, Any] = {"role": "assistant", "content": ""}
        if self._thoughts:
            turn["reasoning_content"] = "".join(self._thoughts)
            self._thoughts.clear()
        self.turns.append(turn)
        return turn
