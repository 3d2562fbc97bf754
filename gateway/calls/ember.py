"""Calls as Ember writes them: one JSON object a line. Many a small model of other families does, too."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from engine.protocol.frames import Grammar
from gateway.calls import lark, objects
from gateway.calls.schemas import offered
from gateway.calls.tape import Reader
from gateway.prompt import ToolChoice


@dataclass(frozen=True, slots=True)
class Ember:
    tokens: Mapping[str, int]
    name: ClassVar[str] = "ember"
    markers: ClassVar[frozenset[str]] = frozenset()

    def parser(self, tools: Sequence[Mapping[str, Any]], choice: ToolChoice) -> Reader:
        return Reader(functools.partial(objects.sequence, names=offered(tools, choice)))

    def grammar(self, tools: Sequence[Mapping[str, Any]], choice: ToolChoice, parallel: bool) -> Grammar | None:
        return lark.grammar(tools, choice, parallel, lark.Frame(between='"\\n"'), lark.written_as_object("arguments"))
