"""Tables, names and JSON, to the letter."""

from __future__ import annotations

import json

from weft.ctl.render import Column, card, json_array, json_document, names, table

COLUMNS = (Column("Name", "name"), Column("Port", "port", "0"), Column("Policies", "policies"))
ROWS = ({"name": "web", "port": 80, "policies": ["p1", "p2"]}, {"name": "a-long-name"})


def test_a_table_is_aligned_by_spaces_under_a_dashed_line() -> None:
    assert table(COLUMNS, ROWS) == (
        "Name         Port  Policies\n----         ----  --------\nweb          80    p1,p2\na-long-name  0\n"
    )


def test_an_empty_table_still_has_its_titles() -> None:
    assert table(COLUMNS, ()) == "Name  Port  Policies\n----  ----  --------\n"


def test_a_card_has_one_line_per_member() -> None:
    assert card(COLUMNS, ROWS[1]) == "Name:     a-long-name\nPort:     0\nPolicies:\n"


def test_names_stand_one_per_line() -> None:
    assert names("name", ROWS) == "web\na-long-name\n"
    assert names("name", ()) == ""


def test_a_json_array_has_one_object_per_line() -> None:
    text = json_array(ROWS)
    assert json.loads(text) == list(ROWS)
    assert len(text.splitlines()) == len(ROWS) + 2
    assert json_array(()) == "[]\n"


def test_a_json_document_is_indented() -> None:
    assert json_document({"Config": {"ä": 1}}) == '{\n  "Config": {\n    "ä": 1\n  }\n}\n'
