"""README, ARCHITECTURE and the pages: short where they are to be, links that lead somewhere, every package named."""

import re
from pathlib import Path

import pytest

from tests.test_house import package_of, path_of, sources

ROOT = Path(__file__).parents[1]
PAGES = [
    path.relative_to(ROOT)
    for pattern in ("*.md", "docs/*.md", "benchmarks/*.md", "gateway/**/*.md", "engine/**/*.md")
    for path in sorted(ROOT.glob(pattern))
]
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]*)(?:#([^)\s]*))?\)")
NAMED = re.compile(r"`((?:gateway|engine|tenants|prefixcache|tests|benchmarks|docs)/[\w./-]*[\w/])`")


def anchors(page: Path) -> set[str]:
    """The names that headings get, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_every_link_leads_somewhere(page: Path) -> None:
    dead = []
    for target, anchor in LINK.findall((ROOT / page).read_text()):
        if target.startswith(("http:", "https:", "mailto:")):
            continue
        path = (ROOT / page).parent / target if target else ROOT / page
        if not path.exists() or (anchor and path.suffix == ".md" and anchor not in anchors(path)):
            dead.append(f"{target}#{anchor}")
    assert dead == []


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_every_file_that_is_named_exists(page: Path) -> None:
    named = NAMED.findall((ROOT / page).read_text())
    assert [name for name in named if not (ROOT / name).exists() and not (ROOT / f"{name}.py").exists()] == []


def test_the_readme_is_a_start_and_not_a_book() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
    assert {path.name for path in (ROOT / "docs").glob("*.md")} <= set(
        re.findall(r"docs/([\w-]+\.md)", (ROOT / "README.md").read_text())
    )


def test_the_architecture_has_a_short_glossary_and_every_package_once() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    words = text[text.index("## Words") : text.index("## Processes")]
    assert len(words.strip().splitlines()) <= 40
    rows = re.findall(r"^\| `([\w/]+)` \|", text, re.MULTILINE)
    assert len(rows) == len(set(rows))
    packages = {package_of(module).replace(".", "/") for module in sources()}
    folders = {name for name in packages if path_of(name.replace("/", ".")).name == "__init__.py" and "/" in name}
    missing = {name for name in folders if not any(name == row or name.startswith(row + "/") for row in rows)}
    assert missing == set()
    assert [row for row in rows if not (ROOT / row).is_dir()] == []
