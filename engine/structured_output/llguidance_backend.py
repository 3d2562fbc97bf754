"""Opens a model's tokenizer and matchers within limits by llguidance. It knows no callers and no threads."""

from pathlib import Path
from typing import Final

import llguidance

from engine.models.config import ModelConfigError, read_decoder_config

PARSER_LIMITS: Final = llguidance.LLParserLimits(
    initial_lexer_fuel=1_000_000,  # some 20 ms
    step_lexer_fuel=50_000,  # of one mask: 4 ms, and
    step_max_items=12_000,  # 1 ms, 40 where they are ambiguous
    max_items_in_row=8_000,  # a row has four for each optional property, of which a schema of 32 KB has 2,000
    max_lexer_states=250_000,  # of some 100 bytes, seldom of 2 KB
    max_grammar_size=500_000,
    verbose_errors=False,  # they would repeat the grammar and the text
)
# Kinds of text whose tokens a mask allows at once where all of them may come. The library's own know strings of at most
# 10 and 30 characters: near the end of a bounded string each token was looked at. These look at fewer.
_STRING: Final = r'[^"\\\x00-\x1F\x7F]'
SLICES: Final = [r"[\x20\x0A\x0D\x09]+", *(f"{_STRING}{{1,{most}}}" for most in (4, 10, 16, 30)), f"{_STRING}+"]


class GrammarTokenizerError(Exception):
    """No grammar can be compiled for a model's folder; the message says why."""


def open_tokenizer(folder: Path) -> llguidance.LLTokenizer:
    """Reads tokenizer.json and config.json. With 128,256 tokens it takes 0.7 s, in which no other thread runs."""
    path = folder / "tokenizer.json"
    if not path.exists():
        raise GrammarTokenizerError("this model's folder has no tokenizer.json, so it knows no grammars")
    try:
        config = read_decoder_config(folder)
        stop_ids = list(config.stop_ids) or None
        return llguidance.LLTokenizer(str(path), n_vocab=config.vocabulary, eos_token=stop_ids, slices=SLICES)
    except (ModelConfigError, ValueError) as error:
        raise GrammarTokenizerError(f"this model's tokenizer.json cannot be used for grammars: {error}") from error


def open_matcher(tokenizer: llguidance.LLTokenizer, lark: str) -> llguidance.LLMatcher:
    """A matcher of a new text; its `get_error` says what is wrong with the grammar. Its first mask is computed."""
    matcher = llguidance.LLMatcher(tokenizer, lark, log_level=0, limits=PARSER_LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()
    return matcher
