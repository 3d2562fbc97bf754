"""What a porter is told as it starts, and what it keeps from one start to the next."""

import contextlib
from pathlib import Path

import msgspec

from engine.process.files import replace_file


class PorterSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that a porter needs, as one JSON document. Without a `news` file the host's certificates are somebody else's
    to renew, and no gateway is asked for anything."""

    folder: str  # of the sockets behind it
    listen: str
    address: str  # HOST:PORT as gateways are told it; HOST empty: as they see it
    certificate: str
    key: str
    authority: str
    news: str | None = None  # a file with what gateways said last
    mirror: str | None = None  # a file with the catalogue of the cluster as gateways said it last
    status: str | None = None  # a file with what this host has of it


class ClusterNews(msgspec.Struct, frozen=True):
    """What gateways said last: where they are, the one that answered first, and which members' keys were removed.
    `joined` is where this host joined, and asks where none of them answers."""

    gateways: list[str] = []
    removed: list[str] = []
    joined: str = ""

    @property
    def places(self) -> list[str]:
        """All gateways to ask, in this order."""
        return list(dict.fromkeys(filter(None, (*self.gateways, self.joined))))


def news_path(state: Path) -> Path:
    """Where a host keeps its news."""
    return state / "identity" / "news.json"


def read_news(path: str | None) -> ClusterNews:
    """What was kept; nothing where it cannot be read."""
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        if path is not None:
            return msgspec.json.decode(Path(path).read_bytes(), type=ClusterNews)
    return ClusterNews()


def write_news(path: Path, news: ClusterNews) -> None:
    """Raises OSError."""
    replace_file(path, msgspec.json.encode(news))
