"""Origins of pages as browsers send them. It knows no settings and no HTTP."""

import re

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://([a-z0-9_]([a-z0-9._-]*[a-z0-9])?|\[[0-9a-f:.]+\])(:[0-9]{1,5})?")


def origin_problem(origin: str) -> str | None:
    """Describes why no browser would ever send this as `Origin`; None for an origin, or * for all."""
    if origin == "*":
        return None
    if _ORIGIN.fullmatch(origin) is None:
        return "is no origin: write scheme, host and port alone, like https://app.example.com or http://localhost:3000"
    scheme, _, rest = origin.partition("://")
    if rest.endswith({"http": ":80", "https": ":443"}.get(scheme, " ")):
        return f"has the port that browsers leave out of {scheme}: write {origin.rpartition(':')[0]}"
    return None
