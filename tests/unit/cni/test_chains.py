"""Lists in a runtime's folder that chain our plugin with what acts on the host end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from weft.cni.chains import HOST_END_PLUGINS, Chain, Chains, read_chain, read_chains
from weft.cni.install import NAMES


def write_list(folder: Path, *plugins: str, name: str = "blue", **members: object) -> Path:
    file = folder / f"{name}.conflist"
    file.write_text(json.dumps({"name": name, "plugins": [{"type": each} for each in plugins]} | members))
    return file


def fault(file: Path) -> str:
    chain = read_chain(file)
    assert chain is not None
    return chain.fault(NAMES)


@pytest.mark.parametrize("foreign", sorted(HOST_END_PLUGINS))
@pytest.mark.parametrize("ours", sorted(NAMES))
def test_what_acts_on_the_host_end_cannot_stand_beside_us(tmp_path: Path, ours: str, foreign: str) -> None:
    """P-51, P-52, P-54: the message names the file and the plugin."""
    file = write_list(tmp_path, "loopback", ours, "tuning", foreign)
    assert foreign in fault(file)
    assert str(file) in fault(file)


def test_other_chains_have_no_fault(tmp_path: Path) -> None:
    assert fault(write_list(tmp_path, "loopback", "weft-cni", "tuning")) == ""
    assert fault(write_list(tmp_path, "bridge", "portmap", "firewall", name="podman")) == ""


def test_a_list_goes_on_in_the_folder_of_its_network(tmp_path: Path) -> None:
    """C-028."""
    (tmp_path / "blue").mkdir()
    (tmp_path / "blue" / "ports.conf").write_text('{"type": "portmap"}')
    assert "portmap" in fault(write_list(tmp_path, "weft-cni"))
    assert fault(write_list(tmp_path, "weft-cni", loadOnlyInlinedPlugins=True)) == ""
    assert fault(write_list(tmp_path, "weft-cni", name="red")) == ""


def test_a_single_plugin_is_a_chain_of_one(tmp_path: Path) -> None:
    file = tmp_path / "1-contiv.conf"
    file.write_text('{"name": "contiv-net", "type": "contivk8s"}')
    assert read_chain(file) == Chain(file, "contiv-net", ("contivk8s",))


def test_unreadable_files_are_skipped(tmp_path: Path) -> None:
    for number, text in enumerate(
        ["", "{", "[]", "7", '{"plugins": 7}', '{"plugins": [7, {"type": 7}]}', "[" * 10_000]
    ):
        (tmp_path / f"{number}.conflist").write_text(text)
    (tmp_path / "notes.txt").write_text('{"type": "weft-cni"}')
    (tmp_path / "gone.conf").symlink_to(tmp_path / "nothing")
    file = write_list(tmp_path, "weft-cni")
    assert list(read_chains(tmp_path)) == [Chain(file, "blue", ("weft-cni",))]
    assert list(read_chains(tmp_path / "nowhere")) == []


def test_a_folder_is_read_again_when_it_has_changed(tmp_path: Path) -> None:
    chains = Chains(tmp_path / "net.d", ours=NAMES)
    assert chains.fault("blue") == ""
    (tmp_path / "net.d").mkdir()
    file = write_list(tmp_path / "net.d", "weft-cni", "portmap")
    assert "portmap" in chains.fault("blue")
    assert chains.fault("red") == ""
    write_list(tmp_path / "net.d", "weft-cni", "tuning")
    assert chains.fault("blue") == ""
    write_list(tmp_path / "net.d", "weft-cni", "bandwidth")
    assert "bandwidth" in chains.fault("blue")
    file.unlink()
    assert chains.fault("blue") == ""
