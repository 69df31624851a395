"""Values of `external_ids` for our ports in OVSDB: for other tools, and for an agent that has just started (pure)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final
from urllib.parse import quote, unquote

from weft.adapters.ovs.ovsdb.bridge import IFACE_ID_KEY, TENANT_KEY
from weft.adapters.ovs.pipeline.tenant_netns_flows import netns_ports
from weft.domain.desired.state import Overlay, Port
from weft.domain.ids import TenantName
from weft.kernel.netlink.link import Link
from weft.ports.datapath import EndpointConfig

_OWNER_KEYS: Final = frozenset({"endpoint-id", "vm-uuid", "weft-netns"})
# What an alias shows as it is.
_SAFE: Final = "/:@_.-"
# Path of the pod's netns.
NETNS_KEY: Final = "weft-netns"


def port_external_ids(port: Port) -> dict[str, str]:
    """The keys that os-vif and Kuryr write (kuryr 2.5), and the tenant."""
    return {
        IFACE_ID_KEY: port.interface,
        "iface-status": "active",
        "attached-mac": port.mac,
        TENANT_KEY: port.tenant,
    }


def endpoint_external_ids(config: EndpointConfig) -> dict[str, str]:
    """The same, and the endpoint's workload (S-20)."""
    return port_external_ids(config.port) | owner_external_ids(config)


def overlay_external_ids(overlay: Overlay) -> dict[str, str]:
    return {"weft-vni": str(overlay.vni), "weft-vxlan-tenant": overlay.tenant}


def netns_port_external_ids(tenants: Mapping[TenantName, int]) -> dict[str, dict[str, str]]:
    """For the netns ports of tenants, by port name."""
    return {name: {"weft-tenant-netns": tenant} for name, tenant in netns_ports(tenants).items()}


def owner_external_ids(config: EndpointConfig) -> dict[str, str]:
    """Endpoint, workload (S-20) and netns of a port."""
    return {"endpoint-id": config.endpoint, "vm-uuid": config.workload, NETNS_KEY: config.netns}


def owner_from_alias(link: Link) -> dict[str, str]:
    """`owner_external_ids` from the alias of the port's device.

    It restores them when the port was deleted from OVSDB, and with it the only other copy.
    """
    words = (word.partition("=") for word in link.alias.split(" "))
    # Only the keys that `device_alias` writes: no netns path can pose as the tenant of a port.
    return {key: unquote(value) for key, separator, value in words if separator and key in _OWNER_KEYS}


def device_alias(config: EndpointConfig) -> str:
    """The alias of a port's device. A space in a value, as a netns path may have, is no separator."""
    return " ".join(f"{name}={quote(value, safe=_SAFE)}" for name, value in owner_external_ids(config).items())
