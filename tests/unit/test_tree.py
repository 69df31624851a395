"""Limits that keep the tree readable: sizes of folders and files, comments, suppressions, contents of the wheel."""

from __future__ import annotations

import io
import tokenize
from collections import Counter

from tests.support.paths import ROOT

SOURCES = sorted((ROOT / "src").rglob("*.py"))
MAX_MODULES = 22
MAX_LINES = 500
MAX_TYPE_IGNORES = 15
MIN_COMMENTS_PER_100_LINES = 4.0


def test_no_folder_has_too_many_modules() -> None:
    counts = Counter(path.parent.relative_to(ROOT) for path in SOURCES)
    assert {str(folder): count for folder, count in counts.items() if count > MAX_MODULES} == {}


def test_no_file_is_too_long() -> None:
    lengths = {str(path.relative_to(ROOT)): path.read_text().count("\n") for path in SOURCES}
    assert {name: length for name, length in lengths.items() if length > MAX_LINES} == {}


def test_few_types_are_ignored() -> None:
    assert sum(path.read_text().count("# type: ignore") for path in SOURCES) <= MAX_TYPE_IGNORES


def test_reasons_are_given_in_comments() -> None:
    comments = lines = 0
    for path in SOURCES:
        source = path.read_text()
        lines += source.count("\n")
        comments += sum(
            token.type == tokenize.COMMENT for token in tokenize.generate_tokens(io.StringIO(source).readline)
        )
    assert comments / lines * 100 >= MIN_COMMENTS_PER_100_LINES


def test_every_package_states_its_purpose() -> None:
    packages = [path for path in SOURCES if path.name == "__init__.py"]
    assert [
        str(path) for path in packages if not path.read_text().startswith('"""') or "TODO" in path.read_text()
    ] == []


def test_the_wheel_ships_no_tests_and_needs_no_test_library() -> None:
    """Only the contract suites of `weft.testing`, an extra, import pytest."""
    users = {
        path.relative_to(ROOT / "src" / "weft").parts[0] for path in SOURCES if "import pytest" in path.read_text()
    }
    assert users <= {"testing"}
