"""The names that find a model: its whole name, its aliases, and the end of its name where no other model's ends alike.
It knows names alone, and neither models nor who may call them.
"""

import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Final

_SUGGESTIONS_MAX: Final = 3
_COMPARED_CHARS: Final = 100  # of a name that nothing has
_SIMILAR: Final = 0.6  # of two names, as difflib measures it


class ModelNames:
    """Names of a catalogue's models. `aliases` are whole names, each with its other ones."""

    def __init__(self, aliases: Mapping[str, Iterable[str]]) -> None:
        self._known = {alias: name for name, others in aliases.items() for alias in others}
        self._known |= {name: name for name in aliases}
        self._by_end: dict[str, list[str]] = {}
        for name in aliases:
            for end in _ends(name):
                self._by_end.setdefault(end, []).append(name)

    def find(self, name: str) -> str | None:
        """The whole name of the model that `name` means; None where there is none, or more than one could be meant."""
        if name in self._known:
            return self._known[name]
        by_end = self._by_end.get(name, ())
        return by_end[0] if len(by_end) == 1 else None

    def suggest(self, name: str, permitted: Callable[[str], bool]) -> list[str]:
        """Names that may be meant by one that finds nothing, the likeliest first: whole ones and aliases, of models
        that are `permitted` by their whole names alone."""
        if name in self._by_end:
            return [whole for whole in self._by_end[name] if permitted(whole)][:_SUGGESTIONS_MAX]
        written = {known: whole for known, whole in self._known.items() if permitted(whole)}
        forms = {form.lower(): known for known in written for form in (*_ends(known), known)}
        close = difflib.get_close_matches(name[:_COMPARED_CHARS].lower(), forms, 2 * _SUGGESTIONS_MAX, _SIMILAR)
        return list(dict.fromkeys(forms[form] for form in close))[:_SUGGESTIONS_MAX]


def _ends(name: str) -> list[str]:
    """`@cf/hearth/ember` → hearth/ember, ember."""
    parts = name.split("/")
    return ["/".join(parts[first:]) for first in range(1, len(parts))]
