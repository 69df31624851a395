"""Network configurations as a runtime reads them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from weft.cni.errors import CniError, Code
from weft.lab.cni.network_lists import NetworkList, parse_list, parse_single, read_network, read_networks


def network(folder: Path | None = None, /, **members: object) -> NetworkList:
    full = {"cniVersion": "1.1.0", "name": "blue", "plugins": [{"type": "weft-cni"}]} | members
    return parse_list(
        json.dumps({name: value for name, value in full.items() if value is not ...}).encode(), folder=folder
    )


def error_of(**members: object) -> CniError:
    with pytest.raises(CniError) as failure:
        network(**members)
    return failure.value


def test_a_list_has_all_keys_of_the_specification() -> None:
    """C-020."""
    read = network(cniVersions=["1.0.0"], disableCheck=True, disableGC=True, loadOnlyInlinedPlugins=True)
    assert (read.name, read.version, read.disable_check, read.disable_gc) == ("blue", "1.1.0", True, True)


def test_members_of_plugins_are_unchanged() -> None:
    """C-023."""
    plugin = {"type": "weft-cni", "colour": {"deep": [1, None]}, "capabilities": {"ips": True, "mac": False}}
    read = network(plugins=[plugin]).plugins[0]
    assert read.members == plugin
    assert read.capabilities == {"ips"}


@pytest.mark.parametrize("plugins", [[{}], [{"type": ""}], [{"type": "../x"}], [7], {}, "x"])
def test_a_plugin_needs_a_type_that_is_no_path(plugins: object) -> None:
    """C-021."""
    assert error_of(plugins=plugins).code == Code.BAD_CONFIG


@pytest.mark.parametrize(
    ("version", "versions", "chosen"),
    [
        ("0.4.0", [], "0.4.0"),
        ("1.0.0", ["0.3.1", "1.1.0"], "1.1.0"),
        ("1.0.0", ["1.2.0", "99.0.0"], "1.0.0"),
        ("1.2.0", ["1.1.0"], "1.1.0"),
        (..., ["0.4.0"], "0.4.0"),
        (..., ..., "0.1.0"),
    ],
)
def test_the_highest_common_version_is_chosen(version: object, versions: object, chosen: str) -> None:
    """C-026."""
    assert network(cniVersion=version, cniVersions=versions).version == chosen


@pytest.mark.parametrize("versions", [[7], ["new"], "1.1.0", ["1"], [None]])
def test_an_invalid_version_is_rejected(versions: object) -> None:
    """C-026."""
    assert error_of(cniVersions=versions).code in {Code.NOT_DECODED, Code.BAD_CONFIG}


def test_a_list_that_is_too_new_is_rejected() -> None:
    assert error_of(cniVersion="2.0.0").code == Code.INCOMPATIBLE_VERSION


@pytest.mark.parametrize(
    ("value", "read"), [("true", True), ("TRUE", True), ("False", False), (True, True), (..., False)]
)
def test_a_boolean_may_be_text(value: object, read: bool) -> None:
    """C-027."""
    assert network(disableCheck=value).disable_check is read


@pytest.mark.parametrize("value", ["yes", 2, [], "1"])
def test_other_values_are_no_boolean(value: object) -> None:
    """C-027."""
    assert error_of(disableGC=value).code == Code.BAD_CONFIG


def test_more_plugins_come_from_the_folder_of_the_network(tmp_path: Path) -> None:
    """C-028."""
    (tmp_path / "blue").mkdir()
    (tmp_path / "blue" / "20-b.conf").write_text('{"type": "b"}')
    (tmp_path / "blue" / "10-a.conf").write_text('{"type": "a"}')
    (tmp_path / "blue" / "note.txt").write_text("x")
    assert [plugin.type for plugin in network(tmp_path).plugins] == ["weft-cni", "a", "b"]
    assert [plugin.type for plugin in network(tmp_path, plugins=...).plugins] == ["a", "b"]
    assert [plugin.type for plugin in network(tmp_path, loadOnlyInlinedPlugins=True).plugins] == ["weft-cni"]


def test_only_inlined_plugins_need_to_be_there() -> None:
    """C-028."""
    assert error_of(plugins=..., loadOnlyInlinedPlugins=True).code == Code.BAD_CONFIG


@pytest.mark.parametrize("plugins", [[], ...])
def test_a_network_has_plugins(plugins: object) -> None:
    """C-029."""
    assert error_of(plugins=plugins).code == Code.BAD_CONFIG


@pytest.mark.parametrize("name", ["", ..., "../x", 7])
def test_a_network_has_a_name(name: object) -> None:
    """C-012."""
    assert error_of(name=name).code == Code.BAD_CONFIG


def test_lists_come_before_single_files(tmp_path: Path) -> None:
    """C-030."""
    for file, name in (("00-old.conf", "old"), ("05-older.json", "older")):
        (tmp_path / file).write_text(json.dumps({"name": name, "type": "weft-cni"}))
    for file, name in (("20-b.conflist", "b"), ("10-a.conflist", "a")):
        (tmp_path / file).write_text(json.dumps({"name": name, "plugins": [{"type": "weft-cni"}]}))
    (tmp_path / "30-c.conflist.bak").write_text("not this one")
    assert [network.name for network in read_networks(tmp_path)] == ["a", "b", "old", "older"]
    assert read_network(tmp_path, "old").plugins[0].type == "weft-cni"
    with pytest.raises(CniError, match="no network c"):
        read_network(tmp_path, "c")


def test_a_single_file_is_a_list_of_one() -> None:
    single = parse_single(b'{"cniVersion":"0.3.1","name":"contiv-net","type":"contivk8s","more":1}')
    assert (single.name, single.version) == ("contiv-net", "0.3.1")
    assert single.plugins[0].members["more"] == 1
