"""A field of a JSON body that its type does not know: how it is refused, and a document without it.

It does not know whether a server refuses or ignores such fields.
"""

from dataclasses import dataclass, replace
from typing import Any, Final
from urllib.parse import quote

from gateway.errors import ApiError
from gateway.field_hints import STEP

IGNORED_FIELDS_MAX: Final = 16  # of one body; each costs a further reading of it
_SHOWN_CHARS: Final = 64


@dataclass(eq=False, repr=False)
class UnknownField(ApiError):
    """The refusal of a field. `place` is the path of the object that has it, like `messages[0]`, and empty for the
    body's own fields; None where it cannot be found again. `name` is as the caller wrote it."""

    place: str | None = None
    name: str = ""

    @property
    def pattern(self) -> str:
        """The field as a header may have it: `messages[].name`, whichever of the messages it was in."""
        place = "".join("[]" if step[0] == "[" else f".{step}" for step in STEP.findall(self.place or ""))
        return quote(f"{place}.{self.name[:_SHOWN_CHARS]}"[1:], safe="[].:@-_")

    def inside(self, field: str) -> "UnknownField":
        """The same of a body that is the value of this field."""
        within = None if self.place is None else f"{field}.{self.place}".removesuffix(".")
        return replace(self, param=f"{field}.{self.param}", place=within)

    def remove_from(self, document: Any) -> None:
        """Takes the field out of a document that has it, also where objects of the same list and `type` have it."""
        assert self.place is not None
        faulty, holders = document, [document]
        for step in STEP.findall(self.place):
            if step[0] == "[":
                faulty = faulty[int(step[1:-1])]
                lists = [holder for holder in holders if isinstance(holder, list)]
                holders = [item for items in lists for item in items if _type(item) == _type(faulty)]
            else:
                faulty = faulty[step]
                holders = [holder[step] for holder in holders if isinstance(holder, dict) and step in holder]
        for holder in holders:
            if isinstance(holder, dict):
                holder.pop(self.name, None)


def _type(item: Any) -> Any:
    return item.get("type") if isinstance(item, dict) else None
