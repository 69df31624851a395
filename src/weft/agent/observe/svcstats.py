"""What `/svcstats` tells (contiv 6.7): by client, by service address, by provider, with Contiv's member names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any

from weft.agent.dataplane.services import TenantServices
from weft.domain.addresses import Address
from weft.domain.ids import TenantName
from weft.domain.loadbalancer.state import FrontendKey
from weft.domain.policy.model.protocols import protocol_name
from weft.ports.datapath import ServiceFlowStats


def show_uses(uses: Iterable[ServiceFlowStats], services: Mapping[TenantName, TenantServices]) -> dict[str, Any]:
    """The uses of services, by the client's address.

    A service has several ports, for which Contiv's form has no room: `PortStats` has one entry for each port that the
    client uses, `SvcStats` has the last of each address. Where workloads of several tenants have a client's address,
    all but the first are told with their tenant.
    """
    shown: dict[str, Any] = {}
    ordered = sorted(uses, key=lambda use: (*_asked(use), use.provider))
    for (tenant, client, front), found in groupby(ordered, key=_asked):
        name = str(client)
        if shown.get(name, {}).get("VrfName", tenant) != tenant:
            name = f"{tenant}:{client}"
        endpoint = shown.setdefault(
            name, {"EndpointIP": str(client), "VrfName": tenant, "PortStats": [], "SvcStats": {}}
        )
        known, providers = services.get(tenant), list(found)
        ports = [known.port_of(front, use.provider) for use in providers] if known else []
        port = {
            "ServiceIP": str(front.address),
            "ServiceVRF": tenant,
            "Protocol": protocol_name(front.protocol).upper(),
            "SvcPort": str(front.port),
            "ProvPort": str(max(ports, default=0)),
            "ProvStats": {str(use.provider): _provider(use) for use in providers},
        }
        endpoint["PortStats"].append(port)
        endpoint["SvcStats"][str(front.address)] = port
    return shown


def _asked(use: ServiceFlowStats) -> tuple[TenantName, Address, FrontendKey]:
    return use.tenant, use.client, use.front


def _provider(use: ServiceFlowStats) -> dict[str, Any]:
    return {
        "ProviderIP": str(use.provider),
        "ServiceIP": str(use.front.address),
        "ServiceVrf": use.tenant,
        "PacketsIn": use.packets_in,
        "BytesIn": use.octets_in,
        "PacketsOut": use.packets_out,
        "BytesOut": use.octets_out,
    }
