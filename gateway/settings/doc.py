"""How a setting carries its line of documentation."""

from typing import Any

from msgspec import Meta


def doc(description: str, **limits: Any) -> Meta:
    """A setting's line of documentation, and the limits of its value as Meta names them."""
    return Meta(description=description, **limits)
