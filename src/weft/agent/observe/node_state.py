"""The state of a node as `/inspect/driver` and `/svcstats` show it (contiv 6.7)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any

from weft.agent.dataplane.services import TenantServices
from weft.agent.store.attachment_store import Attachment, AttachmentStore, Stage
from weft.domain.addresses import Address
from weft.domain.ids import TenantName
from weft.domain.loadbalancer.state import FrontendKey
from weft.domain.policy.model.protocols import protocol_name
from weft.ports.datapath import ServiceFlowStats, TenantNetnsReport


def find_inconsistencies(attachment_store: AttachmentStore, reports: list[TenantNetnsReport]) -> list[str]:
    """Differences between kernel and attachment store. An ADD or DEL in progress may show up here."""
    expected = {
        (attachment.config.port.tenant, attachment.config.port.interface): attachment
        for attachment in attachment_store
        if attachment.config is not None and attachment.stage is not Stage.DELETING
    }
    found = {(report.tenant, name) for report in reports for name in report.ports}
    # Only attached ones: the device of an ADD in progress may not exist yet.
    lost = [
        (name, attachment)
        for (tenant, name), attachment in expected.items()
        if (tenant, name) not in found and attachment.stage is Stage.ATTACHED
    ]
    return [
        *(
            f"device {name} of tenant {tenant} belongs to no attachment"
            for tenant, name in sorted(found - expected.keys())
        ),
        *(f"attachment {attachment.endpoint.endpoint_id} has lost its device {name}" for name, attachment in lost),
    ]


def show_netns(report: TenantNetnsReport) -> dict[str, Any]:
    return {
        "tenant": report.tenant,
        "ports": list(report.ports),
        "devices": list(report.devices),
        "faults": list(report.faults),
    }


def show_port(attachment: Attachment) -> dict[str, Any]:
    endpoint, config = attachment.endpoint, attachment.config
    return {
        "tenant": endpoint.tenant,
        "network": endpoint.network,
        "group": endpoint.group,
        "endpointID": endpoint.endpoint_id,
        "containerID": endpoint.container_id,
        "containerName": endpoint.container_name,
        "ipAddress": endpoint.ip_address,
        "ipv6Address": endpoint.ipv6_address,
        "macAddress": endpoint.mac_address,
        "interface": endpoint.interface,
        "device": config.port.interface if config else "",
        "netns": config.netns if config else "",
        "stage": attachment.stage,
        "published": attachment.published,
    }


def show_service_stats(
    flows: Iterable[ServiceFlowStats], services: Mapping[TenantName, TenantServices]
) -> dict[str, Any]:
    """Service traffic by client address, with Contiv's member names.

    Contiv's format has one port per service: `PortStats` has an entry for each port that the client uses, `SvcStats`
    the last one of each service address. Where endpoints of several tenants have the same address, all keys but the
    first have their tenant as a prefix.
    """
    # groupby needs its input sorted by the same key.
    shown: dict[str, Any] = {}
    ordered = sorted(flows, key=lambda flow: (*_flow_key(flow), flow.provider))
    for (tenant, client, frontend), found in groupby(ordered, key=_flow_key):
        name = str(client)
        if shown.get(name, {}).get("VrfName", tenant) != tenant:
            name = f"{tenant}:{client}"
        endpoint = shown.setdefault(
            name, {"EndpointIP": str(client), "VrfName": tenant, "PortStats": [], "SvcStats": {}}
        )
        known, providers = services.get(tenant), list(found)
        ports = [known.port_of(frontend, flow.provider) for flow in providers] if known else []
        port = {
            "ServiceIP": str(frontend.address),
            "ServiceVRF": tenant,
            "Protocol": protocol_name(frontend.protocol).upper(),
            "SvcPort": str(frontend.port),
            "ProvPort": str(max(ports, default=0)),
            "ProvStats": {str(flow.provider): _provider_stats(flow) for flow in providers},
        }
        endpoint["PortStats"].append(port)
        endpoint["SvcStats"][str(frontend.address)] = port
    return shown


def _flow_key(flow: ServiceFlowStats) -> tuple[TenantName, Address, FrontendKey]:
    return flow.tenant, flow.client, flow.frontend


def _provider_stats(flow: ServiceFlowStats) -> dict[str, Any]:
    return {
        "ProviderIP": str(flow.provider),
        "ServiceIP": str(flow.frontend.address),
        "ServiceVrf": flow.tenant,
        "PacketsIn": flow.packets_in,
        "BytesIn": flow.bytes_in,
        "PacketsOut": flow.packets_out,
        "BytesOut": flow.bytes_out,
    }
