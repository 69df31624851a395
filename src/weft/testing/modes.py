"""On which datapath and in which modes a test runs: marks for tests, or modules of them, whose labs have names."""

from __future__ import annotations

from typing import Final

import pytest

from weft.testing.netlab import NetLab

BOTH_MODES: Final = pytest.mark.parametrize("fwdmode", ["routing", "bridge"])
BRIDGE_IN_SOAK: Final = pytest.mark.parametrize("fwdmode", ["routing", pytest.param("bridge", marks=pytest.mark.soak)])
"""The same test in bridge mode is one of the long runs."""


def _soaked(*names: str) -> list[object]:
    return [pytest.param(name, marks=pytest.mark.soak) for name in names]


ON_OVS_TOO: Final = pytest.mark.parametrize("lab", ["linux", "ovs", *_soaked("ovs-vlan")], indirect=True)
ON_BOTH: Final = pytest.mark.parametrize("lab", ["linux", "ovs"], indirect=True)
ON_OVS_AND_TAGS: Final = pytest.mark.parametrize("lab", ["linux", "ovs", "ovs-vlan"], indirect=True)
"""A sample: what else runs on networks of VLAN tags does so in the long runs."""
OVS_MODES_IN_SOAK: Final = pytest.mark.parametrize("lab", ["linux", *_soaked("ovs", "ovs-vlan")], indirect=True)
OVS_IN_SOAK: Final = pytest.mark.parametrize("lab", ["linux", *_soaked("ovs")], indirect=True)
"""For what has been tried with vxlan only."""
_MORE = _soaked("ovs-vlan", "ovs-vxlan-bridge", "ovs-vlan-bridge")
_ALL = ["linux", "ovs", *_MORE]
ON_ALL: Final = pytest.mark.parametrize("lab", _ALL, indirect=True)
TOWNS_ON_OVS: Final = pytest.mark.parametrize("lab", _ALL, indirect=True, scope="module")
"""For tests that share a lab with others of their module."""
TOWNS_ROUTED_IN_SOAK: Final = pytest.mark.parametrize(
    "lab", ["linux", *_soaked("ovs", "ovs-vlan")], indirect=True, scope="module"
)
TOWNS_OVS_IN_SOAK: Final = pytest.mark.parametrize("lab", ["linux", *_soaked("ovs")], indirect=True, scope="module")
"""The same for what has been tried in these modes only."""


def needs_routing(lab: NetLab) -> None:
    """Leave a test out where nobody routes between networks."""
    if lab.fwdmode == "bridge":
        pytest.skip("in bridge mode nobody routes between networks (N3)")
