"""Marks that select the datapaths and modes in which a test or a module runs."""

from __future__ import annotations

from typing import Final

import pytest

from weft.lab.netlab import NetLab

BOTH_MODES: Final = pytest.mark.parametrize("fwdmode", ["routing", "bridge"])
# The bridge-mode variant runs with the soak tests only.
BRIDGE_IN_SOAK: Final = pytest.mark.parametrize("fwdmode", ["routing", pytest.param("bridge", marks=pytest.mark.soak)])


def _in_soak(*names: str) -> list[object]:
    return [pytest.param(name, marks=pytest.mark.soak) for name in names]


_MORE = _in_soak("ovs-vlan", "ovs-vxlan-bridge", "ovs-vlan-bridge")
_ALL = ["linux", "ovs", *_MORE]
_ALL_IN_SOAK = ["linux", *_in_soak("ovs"), *_MORE]
ON_ALL: Final = pytest.mark.parametrize("lab", _ALL, indirect=True)
ALL_IN_SOAK: Final = pytest.mark.parametrize("lab", _ALL_IN_SOAK, indirect=True)
TOWNS_ON_ALL: Final = pytest.mark.parametrize("lab", _ALL, indirect=True, scope="module")
# For tests that share a lab within their module.
TOWNS_ALL_IN_SOAK: Final = pytest.mark.parametrize("lab", _ALL_IN_SOAK, indirect=True, scope="module")

# This mark and the next are for tests that choose the forwarding mode themselves, or need routing.
ON_OVS_TOO: Final = pytest.mark.parametrize("lab", ["linux", "ovs", *_in_soak("ovs-vlan")], indirect=True)
OVS_MODES_IN_SOAK: Final = pytest.mark.parametrize("lab", ["linux", *_in_soak("ovs", "ovs-vlan")], indirect=True)
# A sample of VLAN networks; all others run with the soak tests.
ON_OVS_AND_TAGS: Final = pytest.mark.parametrize("lab", ["linux", "ovs", "ovs-vlan"], indirect=True)
_BRIDGED = [pytest.param(netmode, "bridge", marks=pytest.mark.soak) for netmode in ("vxlan", "vlan")]
OVS_IN_ALL_MODES: Final = pytest.mark.parametrize(
    ("netmode", "fwdmode"),
    [("vxlan", "routing"), pytest.param("vlan", "routing", marks=pytest.mark.soak), *_BRIDGED],
)
# For tests that always use Open vSwitch; the second mark is for a sample.
OVS_WITH_TAGS_AND_MORE: Final = pytest.mark.parametrize(
    ("netmode", "fwdmode"), [("vxlan", "routing"), ("vlan", "routing"), *_BRIDGED]
)


def needs_routing(lab: NetLab) -> None:
    """Skip a test in bridge mode."""
    if lab.fwdmode == "bridge":
        pytest.skip("bridge mode does not route between networks (N3)")
