"""Which tools a model may, must or must not call."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class ToolSelection:
    """Whether the model calls tools: as it likes (auto), not at all (none), at least once (required), or this one."""

    mode: Literal["auto", "none", "required", "named"] = "auto"
    name: str | None = None
