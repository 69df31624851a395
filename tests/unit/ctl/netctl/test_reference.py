"""The reference in docs/ says what the program does."""

from __future__ import annotations

from tests.support.paths import DOCS

from weft.ctl.netctl.reference import reference

PAGE = DOCS / "reference" / "netctl.md"


def test_the_reference_is_up_to_date() -> None:
    assert PAGE.read_text() == reference(), "run: make docs"


def test_option_texts_say_what_the_options_do() -> None:
    """W25: the original had the texts of two options swapped."""
    lines = reference().splitlines()
    assert any(line.startswith("| `--vlan-range") and "VLAN tags" in line for line in lines)
    assert any(line.startswith("| `--vxlan-range") and "VXLAN ids" in line for line in lines)
    assert any(line.startswith("| `--from-group") and "source group" in line for line in lines)
    assert any(line.startswith("| `--to-group") and "destination group" in line for line in lines)
    assert any(line.startswith("| `--from-network") and "source network" in line for line in lines)
    assert any(line.startswith("| `--to-network") and "destination network" in line for line in lines)
