"""Pages and citations: links lead somewhere, paths and ids exist, lines of prose are short."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from tests.support.paths import DOCS, ROOT

PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])
# Pages of which the form of lines counts. The others are generated, or tables.
PROSE = sorted([
    *(DOCS / "design").glob("*.md"),
    *(DOCS / "adr").glob("*.md"),
    ROOT / "ARCHITECTURE.md",
    ROOT / "CONTRIBUTING.md",
    DOCS / "glossary.md",
])  # fmt: skip
WIDTH = 110

LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
FENCE = re.compile(r"^\s*```.*?^\s*```", re.MULTILINE | re.DOTALL)

# `dns/wire.py`, `runtime/store/{mirror,election}.py`, `adapters/stores/etcd*.py`, `wire.py`.
SOURCE_PATH = re.compile(r"`([\w.{},*/-]+\.(?:py|c))`")
BRACES = re.compile(r"\{([^}]*)\}")
SOURCES = ("src/weft", "tests", "bench", "scripts")

# Ids of docs/compatibility: C-098, S-20, W12, K3, contiv 7.14, kuryr 2.5, cni 2.
CITATION = re.compile(r"\b([CPSD]-\d{2,3}|[BEHKNOPQRSTW]\d{1,2}|(?:contiv|kuryr|cni) \d{1,2}(?:\.\d{1,2})?)\b")
ROW = re.compile(r"^\| ([^|]+?) \|", re.MULTILINE)
# The section number of a heading: "### 10.5 …" in contiv.md, "## kuryr 2.5: …" elsewhere.
SECTION = re.compile(r"^#+ (?:(?:contiv|kuryr|cni) )?(\d+(?:\.\d+)?)[.: ]", re.MULTILINE)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def slug(heading: str) -> str:
    """The anchor that GitHub makes from a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@cache
def read(page: Path) -> str:
    return page.read_text()


@cache
def prose(page: Path) -> str:
    """A page without its code blocks, whose lines become empty."""
    return FENCE.sub(lambda block: "\n" * block[0].count("\n"), read(page))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_leads_somewhere(page: Path) -> None:
    broken = []
    for link in LINK.findall(prose(page)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in map(slug, HEADING.findall(prose(target)))):
            broken.append(link)
    assert broken == []


@cache
def source_files() -> frozenset[str]:
    return frozenset(
        name_of(path) for folder in SOURCES for path in (ROOT / folder).rglob("*") if path.suffix in {".py", ".c"}
    )


def expand(pattern: str) -> Iterator[str]:
    """`a/{b,c}.py` as a/b.py and a/c.py."""
    if (group := BRACES.search(pattern)) is None:
        yield pattern
        return
    for choice in group[1].split(","):
        yield from expand(pattern[: group.start()] + choice + pattern[group.end() :])


def is_source(path: str) -> bool:
    """Whether a source file has this path, or ends with it: pages leave out what they have said before."""
    ending = re.compile(r"(?:.*/)?" + re.escape(path).replace(r"\*", r"[^/]*"))
    return any(ending.fullmatch(file) for file in source_files())


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_source_file_named_exists(page: Path) -> None:
    if page.name == "CHANGELOG.md":
        pytest.skip("it names files of the past")
    named = {path for pattern in SOURCE_PATH.findall(read(page)) for path in expand(pattern)}
    assert [path for path in sorted(named) if not is_source(path)] == []


@cache
def known_ids() -> frozenset[str]:
    ids: set[str] = set()
    for page in (DOCS / "compatibility").glob("*.md"):
        ids.update(ROW.findall(read(page)))
        ids.update(f"{page.stem} {number}" for number in SECTION.findall(read(page)))
    return frozenset(ids)


def cited_in(path: Path) -> set[str]:
    return set(CITATION.findall(path.read_text()))


def test_every_citation_has_a_row() -> None:
    """Ids in sources, tests and pages are explained in docs/compatibility."""
    files = [ROOT / file for file in source_files() if file.startswith(("src/", "tests/", "bench/"))]
    cited = {(name_of(path), each) for path in [*files, *PAGES] for each in cited_in(path)}
    assert sorted((file, each) for file, each in cited if each not in known_ids()) == []
    assert {"W12", "C-098", "S-20", "K3", "contiv 7.14"} <= {each for _, each in cited}


@pytest.mark.parametrize("page", PROSE, ids=name_of)
def test_lines_of_prose_are_short(page: Path) -> None:
    lines = enumerate(prose(page).splitlines(), start=1)
    assert [number for number, line in lines if len(line) > WIDTH and not line.lstrip().startswith("|")] == []
