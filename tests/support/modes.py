"""On which datapath and in which modes a test runs: marks for tests, or modules of them, whose labs have names."""

from __future__ import annotations

from typing import Final

import pytest

from weft.lab.netlab import NetLab

BOTH_MODES: Final = pytest.mark.parametrize("fwdmode", ["routing", "bridge"])
# The same test in bridge mode is one of the long runs.
BRIDGE_IN_SOAK: Final = pytest.mark.parametrize("fwdmode", ["routing", pytest.param("bridge", marks=pytest.mark.soak)])


def _soaked(*names: str) -> list[object]:
    return [pytest.param(name, marks=pytest.mark.soak) for name in names]


_MORE = _soaked("ovs-vlan", "ovs-vxlan-bridge", "ovs-vlan-bridge")
_ALL = ["linux", "ovs", *_MORE]
_ALL_IN_SOAK = ["linux", *_soaked("ovs"), *_MORE]
ON_ALL: Final = pytest.mark.parametrize("lab", _ALL, indirect=True)
ALL_IN_SOAK: Final = pytest.mark.parametrize("lab", _ALL_IN_SOAK, indirect=True)
TOWNS_ON_ALL: Final = pytest.mark.parametrize("lab", _ALL, indirect=True, scope="module")
# For tests that share a lab with others of their module.
TOWNS_ALL_IN_SOAK: Final = pytest.mark.parametrize("lab", _ALL_IN_SOAK, indirect=True, scope="module")

# This one and the next are for tests that say themselves how networks are forwarded, or need them routed.
ON_OVS_TOO: Final = pytest.mark.parametrize("lab", ["linux", "ovs", *_soaked("ovs-vlan")], indirect=True)
OVS_MODES_IN_SOAK: Final = pytest.mark.parametrize("lab", ["linux", *_soaked("ovs", "ovs-vlan")], indirect=True)
# A sample: what else runs on networks of VLAN tags does so in the long runs.
ON_OVS_AND_TAGS: Final = pytest.mark.parametrize("lab", ["linux", "ovs", "ovs-vlan"], indirect=True)
_BRIDGED = [pytest.param(netmode, "bridge", marks=pytest.mark.soak) for netmode in ("vxlan", "vlan")]
OVS_IN_ALL_MODES: Final = pytest.mark.parametrize(
    ("netmode", "fwdmode"),
    [("vxlan", "routing"), pytest.param("vlan", "routing", marks=pytest.mark.soak), *_BRIDGED],
)
# For tests whose labs have Open vSwitch anyway; the second is for a sample.
OVS_WITH_TAGS_AND_MORE: Final = pytest.mark.parametrize(
    ("netmode", "fwdmode"), [("vxlan", "routing"), ("vlan", "routing"), *_BRIDGED]
)


def needs_routing(lab: NetLab) -> None:
    """Leave a test out where nobody routes between networks."""
    if lab.fwdmode == "bridge":
        pytest.skip("in bridge mode nobody routes between networks (N3)")
