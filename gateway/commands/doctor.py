"""x"""

from typing import Any


def add(commands: Any) -> None:
    commands.add_parser("doctor")
