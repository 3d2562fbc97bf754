"""The pages that the code writes: docs/reference.md and docs/sizing.md. Run as a program it writes them anew; a test
fails where they are stale.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from engine.bench.geometries import GEOMETRIES
from engine.protocol.specs import DRIVER_RESERVE_BYTES
from gateway.api import body_fields
from gateway.catalogue.model_config import context_of, geometry_of
from gateway.cli import COMMANDS
from gateway.http import json_body, unknown_fields
from gateway.observability.metrics import Metrics
from gateway.settings.reference import settings
from tenants.records.batches import BATCH_BYTES_MAX, BATCH_ITEMS_MAX, ITEM_BYTES_MAX, OPEN_BATCHES_MAX
from tenants.records.limits import RANGES

DOCS: Final = Path(__file__).parents[2] / "docs"
GPUS: Final = {"24 GB": 24, "48 GB": 48, "80 GB": 80, "141 GB": 141}
CONTEXT: Final = 4096
WORKSPACE_BYTES: Final = 2 << 30  # beside weights and KV: what a step needs, about
GENERATED: Final = "<!-- Written by `python -m tests.support.generated_pages`; do not edit. -->"


def pages() -> dict[str, str]:
    """The text of each page by its file's name."""
    return {"reference.md": "\n".join(_reference()) + "\n", "sizing.md": "\n".join(_sizing()) + "\n"}


def _reference() -> Iterator[str]:
    yield from ("# Reference", "", GENERATED, "")
    yield from ("Everything that has a name here. [api.md](api.md) has the HTTP API.", "", "## Settings", "")
    yield "`hearth.toml`, all of it optional but what says required. `hearth doctor --settings` prints the same."
    yield from _table("setting", "default", "what it is")
    for key, default, description in settings():
        shown = "required" if default is ... else "" if default is None else f"`{_plain(default)}`"
        yield f"| `{key}` | {shown} | {_cell(description)} |"
    yield from ("", "## Commands", "", "Each has `--help` with examples.")
    yield from _table("command", "what it does")
    yield from (f"| `hearth {name}` | {_cell(summary)} |" for name, summary in COMMANDS.items())
    yield from ("", "## Limits of accounts, tokens, plans and classes")
    yield from _table("limit", "from", "to")
    yield from (f"| `{name}` | {int(low):,} | {int(high):,} |" for name, (low, high) in RANGES.items())
    yield from ("", "## Limits of a request")
    yield from _table("what", "at most")
    yield from (f"| {what} | {most:,} |" for what, most in _request_limits().items())
    yield from ("", "## Metrics", "", "At `/metrics`; those for operators need a token that may read metrics.")
    metrics = Metrics(1)
    for title, registry in (("For everybody", metrics.registry), ("For operators", metrics.operator_registry)):
        yield from ("", f"### {title}")
        yield from _table("metric", "kind", "what it is")
        families = sorted(registry.collect(), key=lambda family: family.name)
        yield from (f"| `{family.name}` | {family.type} | {_cell(family.documentation)} |" for family in families)


def _table(*heads: str) -> tuple[str, ...]:
    return "", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"


def _request_limits() -> dict[str, int]:
    return {
        "values of a body": json_body.VALUES_MAX,
        "levels of a body": json_body.DEPTH_MAX,
        "fields of a query string": json_body.QUERY_FIELDS_MAX,
        "unknown fields that are ignored": unknown_fields.IGNORED_FIELDS_MAX,
        "messages": body_fields.MESSAGES_MAX,
        "choices (`n`)": body_fields.CHOICES_MAX,
        "stop strings": body_fields.STOPS_MAX,
        "entries of `logit_bias`": body_fields.BIASES_MAX,
        "`top_logprobs`": body_fields.LOGPROBS_MAX,
        "requests of a batch": BATCH_ITEMS_MAX,
        "bytes of a batch": BATCH_BYTES_MAX,
        "bytes of a request in a batch": ITEM_BYTES_MAX,
        "batches of an account that have not ended": OPEN_BATCHES_MAX,
    }


def _sizing() -> Iterator[str]:
    yield from ("# Sizing: which GPU for which model", "", GENERATED, "")
    yield (
        f"How many conversations of {CONTEXT:,} tokens each fit at once beside the weights, in bfloat16 on one GPU; – "
        f"where not one does. {WORKSPACE_BYTES >> 30} GiB for a step's workspace and {DRIVER_RESERVE_BYTES / 2**30:g} "
        "GiB for the driver are left free. Prefixes that conversations share count once, so that real loads fit more; "
        '`kv_dtype = "fp8"` doubles the number, and [12-bit weights](weights.md) take a quarter off the weights. '
        "gpt-oss is published in mxfp4."
    )
    yield from ("", f"| model's geometry | weights | KV of {CONTEXT:,} tokens | context | {' | '.join(GPUS)} |")
    yield "|---|---|---|---|" + "---|" * len(GPUS)
    for name, config in GEOMETRIES.items():
        if name in ("tiny", "scout-rank", "scout-slice"):  # no models that anybody serves
            continue
        try:
            geometry = geometry_of(config)
            weights, kv = 2 * geometry.parameters(config) - _saved(config), 2 * geometry.kv_numbers(CONTEXT)
        except (KeyError, ValueError):
            continue
        fits = [_fitting(gigabytes * 10**9, weights, kv) for gigabytes in GPUS.values()]
        numbers = f"{weights / 1e9:.1f} GB | {kv / 1e6:,.0f} MB | {context_of(config):,}"
        yield f"| {name} | {numbers} | {' | '.join(fits)} |"
    yield from (
        "",
        "`hearth models show NAME` says the same of a model that is here, with its settings; `hearth doctor` says "
        "whether all models fit at once. Models that do not may take turns: [standby.md](standby.md). On a CPU weights "
        "and KV lie in memory, whose bandwidth ÷ weights bounds the tokens per second of one answer.",
        "",
        "[performance.md](performance.md) has how many answers at once a GPU gives at which speed.",
    )


def _saved(config: Mapping[str, Any]) -> int:
    """The bytes that experts in mxfp4, of which 32 numbers take 17, lack to those in bfloat16."""
    if "quantization_config" not in config:
        return 0
    numbers = 3 * config["num_hidden_layers"] * config["hidden_size"] * config["intermediate_size"]
    return numbers * config["num_local_experts"] * (64 - 17) // 32


def _fitting(gpu_bytes: int, weights: int, kv: int) -> str:
    left = gpu_bytes - DRIVER_RESERVE_BYTES - WORKSPACE_BYTES - weights
    return f"{left // kv:,}" if left >= kv else "–"


def _plain(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def main() -> None:
    for name, text in pages().items():
        (DOCS / name).write_text(text)


if __name__ == "__main__":
    main()
