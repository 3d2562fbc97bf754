"""System prompts that an operator publishes, as the token prefixes that a model's replicas keep for everybody.

It knows files and templates, and not what becomes of the tokens. A published text is anybody's to read from the cache
at the price and in the time of a cached one, so it must hold nothing that one tenant keeps from another.
"""

from itertools import takewhile
from pathlib import Path
from typing import Final

from gateway.settings.config import SettingsError
from gateway.text.tokenizer import ModelTokenizer, TokenizationError

BYTES_MAX: Final = 1 << 20  # of one file
_CALLERS: Final = ("a", "ß")  # two first words of a caller that no tokenizer begins with the same token


def public_prefixes(text: ModelTokenizer, paths: list[str], model: str) -> list[list[int]]:
    """The first tokens of every conversation that opens with one of these system prompts. Raises SettingsError."""
    return [_prefix(text, _read(Path(path), model), f"public_prefixes of {model}: {path}") for path in paths]


def _read(path: Path, model: str) -> str:
    try:
        content = path.read_bytes()
        if len(content) > BYTES_MAX:
            raise ValueError(f"it has more than {BYTES_MAX:,} bytes")
        written = content.decode()
        if not written.strip():
            raise ValueError("it is empty")
    except (OSError, ValueError) as error:
        raise SettingsError(f"public_prefixes of {model}: {path}: {error}") from error
    return written


def _prefix(text: ModelTokenizer, written: str, where: str) -> list[int]:
    try:
        first, second = (_conversation(text, written, caller) for caller in _CALLERS)
    except TokenizationError as error:
        raise SettingsError(f"{where}: {error}") from error
    alike = takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
    return [token for token, _ in alike]


def _conversation(text: ModelTokenizer, written: str, caller: str) -> list[int]:
    """A model without a chat template is given the text and what follows as one."""
    if not text.has_chat_template:
        return text.encode_prompt(f"{written}\n\n{caller}")
    return text.encode_chat([{"role": "system", "content": written}, {"role": "user", "content": caller}])
