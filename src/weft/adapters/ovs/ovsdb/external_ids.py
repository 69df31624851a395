"""What is written beside our ports in the switch's database, for others and for a process with no memory (pure)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from weft.adapters.ovs.ovsdb.bridge import INTERFACE_MARK, TENANT_MARK
from weft.adapters.ovs.pipeline.tenant_netns_flows import legs_of
from weft.domain.desired.state import Overlay, Port
from weft.domain.ids import TenantName
from weft.kernel.netlink.link import Link
from weft.ports.datapath import EndpointConfig

# Where the workload's end is.
NAMESPACE_MARK: Final = "weft-netns"


def port_marks(port: Port) -> dict[str, str]:
    """What others look for at a port (kuryr 2.5), and whose it is."""
    return {
        INTERFACE_MARK: port.interface,
        "iface-status": "active",
        "attached-mac": port.mac,
        TENANT_MARK: port.tenant,
    }


def wiring_marks(wiring: EndpointConfig) -> dict[str, str]:
    """The same, and whose workload it is (S-20)."""
    return port_marks(wiring.port) | owner_marks(wiring)


def overlay_marks(overlay: Overlay) -> dict[str, str]:
    return {"weft-vni": str(overlay.vni), "weft-overlay-of": overlay.tenant}


def leg_marks(tenants: Mapping[TenantName, int]) -> dict[str, dict[str, str]]:
    """Those of all legs of some tenants, by the legs' names."""
    return {name: {"weft-space-of": tenant} for name, tenant in legs_of(tenants).items()}


def owner_marks(wiring: EndpointConfig) -> dict[str, str]:
    """Whose workload it is (S-20), and where."""
    return {"endpoint-id": wiring.endpoint, "vm-uuid": wiring.workload, NAMESPACE_MARK: wiring.netns}


def told_owner(link: Link) -> dict[str, str]:
    """The same as a host end tells it: the port that bore the marks may be gone with all who knew."""
    words = (word.partition("=") for word in link.alias.split(" "))
    return {name: value for name, is_mark, value in words if is_mark}
