"""docs/reference.md and docs/sizing.md are what the code says now."""

import re

from gateway.settings.config import PriceConfig
from tests.support.generated_pages import DOCS, pages


def test_generated_pages_are_not_stale() -> None:
    written = {name: (DOCS / name).read_text() for name in pages()}
    assert written == pages(), "write them anew: python -m tests.support.generated_pages"


def test_the_sizing_table_has_models_that_fit_and_some_that_do_not() -> None:
    rows = [line for line in pages()["sizing.md"].splitlines() if line.startswith("| ")]
    (llama,) = [row.split(" | ") for row in rows if row.startswith("| llama-3.1-8b |")]
    assert llama[1] == "16.1 GB", "8.03e9 parameters of two bytes"
    assert llama[2] == "537 MB", "4,096 tokens, 32 layers, 8 heads of 128, keys and values, two bytes"
    assert any(row.split(" | ")[4] == "–" for row in rows)


def test_the_neurons_of_the_first_calls_table_are_those_of_the_default_prices() -> None:
    price = PriceConfig()
    row = re.compile(r"^\| (.*) \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \| ([\d.]+) \|$", re.MULTILINE)
    rows = row.findall((DOCS / "first-call.md").read_text())
    assert len(rows) == 5
    for what, *numbers, neurons in rows:
        prompt, cached, output = (int(number.replace(",", "")) for number in numbers)
        cost = (prompt - cached) * price.input + cached * price.input / 5 + output * price.output
        part = price.batch if "batch" in what else 1.0
        assert round(cost * part / 1e6, 1) == float(neurons), what
