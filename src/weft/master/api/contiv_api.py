"""Contiv's plugin API (contiv 2.4): addresses and endpoints, with Contiv's CamelCase members."""

from __future__ import annotations

from typing import Any, Literal, TypeVar

import msgspec
from aiohttp import web

from weft.domain import codec, kinds, model
from weft.domain.addresses import Address, Subnet, parse_subnet_v4
from weft.domain.cluster import Cluster
from weft.domain.errors import Conflict, Exhausted, Invalid, Malformed, NotFound, WeftError
from weft.domain.ids import EndpointId, EndpointKey, GroupKey, GroupName, NetworkName, TenantName, check_endpoint_id
from weft.domain.ipam.ipam import subnet_of
from weft.master.control.control import ControlPlane
from weft.runtime.backoff import Backoff
from weft.runtime.http import JSON_TYPE, json_response
from weft.runtime.routes import Route

B = TypeVar("B", bound="Body")

# How long the agent may take to publish the endpoint of a container that has just started.
PUBLISH_TIMEOUT_S = 5.0


class Body(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the request bodies."""


class AllocAddress(Body, frozen=True, kw_only=True):
    """Reserve an address of a network (`net.tenant`, `net:group.tenant`), or of the network with this pool."""

    NetworkID: str = ""
    AddressPool: str = ""
    PreferredIPv4Address: str = ""


class ReleaseAddress(Body, frozen=True, kw_only=True):
    """Release a reserved address."""

    NetworkID: str = ""
    IPv4Address: str = ""


class ConfigEP(Body, frozen=True, kw_only=True):
    """The runtime's part of an endpoint."""

    Container: str = ""
    Host: str = ""
    IPAddress: str = ""
    IPv6Address: str = ""
    ServiceName: str = ""


class CreateEndpoint(Body, frozen=True, kw_only=True):
    """Create an endpoint on a network, optionally in a group (`ServiceName`)."""

    TenantName: str
    NetworkName: str
    EndpointID: str
    ServiceName: str = ""
    EPCommonName: str = ""
    ConfigEP: ConfigEP = ConfigEP()


class DeleteEndpoint(Body, frozen=True, kw_only=True):
    """Delete an endpoint."""

    TenantName: str
    NetworkName: str
    EndpointID: str
    ServiceName: str = ""
    IPv4Address: str = ""


class UpdateEndpoint(Body, frozen=True, kw_only=True):
    """Container started or died: set its labels, which select the services it is a provider of."""

    Event: Literal["start", "die"]
    Tenant: str = "default"
    Network: str = ""
    EndpointID: str = ""
    ContainerID: str = ""
    IPAddress: str = ""
    EPCommonName: str = ""
    Labels: dict[str, str] = {}


class ContivApi:
    """The plugin routes."""

    def __init__(self, control: ControlPlane, *, cluster_mode: str) -> None:
        self._control = control
        self._cluster_mode = cluster_mode

    def routes(self) -> tuple[Route, ...]:
        calls: tuple[tuple[str, Any, type[Body], Any], ...] = (
            ("allocAddress", self.alloc_address, AllocAddress, dict[str, str]),
            ("releaseAddress", self.release_address, ReleaseAddress, str),
            ("createEndpoint", self.create_endpoint, CreateEndpoint, dict[str, Any]),
            ("deleteEndpoint", self.delete_endpoint, DeleteEndpoint, dict[str, Any]),
            ("updateEndpoint", self.update_endpoint, UpdateEndpoint, dict[str, str]),
        )
        return (
            *(
                Route(method="POST", path=f"/plugin/{name}", handler=handler, body=body, answer=answer,
                      about=(body.__doc__ or "").strip())
                for name, handler, body, answer in calls
            ),
            Route(method="DELETE", path="/debug/epcleanup/tenant/{tenant}/{what}/{id}", handler=self.clean_up,
                  about="Force-delete endpoints: of a network (net), of a group (group), or one (ep)",
                  answer=dict[str, Any]),
        )  # fmt: skip

    @property
    def _cluster(self) -> Cluster:
        return self._control.cluster

    async def alloc_address(self, request: web.Request) -> web.Response:
        call = await _read(request, AllocAddress)
        if self._cluster_mode == "swarm-mode" and call.AddressPool and not call.NetworkID:
            subnet, network_of_pool = self._network_of_pool(call.AddressPool)
            if network_of_pool is None:  # swarm mode requests a gateway address before it creates the network
                return json_response({"NetworkID": "", "IPv4Address": _first_of(subnet)})
        network, group = self._find_pool(call.NetworkID, call.AddressPool)
        address = await self._control.reserve_address(network, group, asked=call.PreferredIPv4Address)
        body = {
            "NetworkID": call.NetworkID or f"{network.name}.{network.tenant}",
            "IPv4Address": _with_length(network, address),
        }
        return json_response(body)

    async def release_address(self, request: web.Request) -> web.Response:
        call = await _read(request, ReleaseAddress)
        network, _ = self._find_pool(call.NetworkID, "")
        await self._control.release_address(network, call.IPv4Address.partition("/")[0])
        return json_response("success")

    async def create_endpoint(self, request: web.Request) -> web.Response:
        call = await _read(request, CreateEndpoint)
        # The host may have no agent; then there is no VTEP.
        node = self._cluster.get(kinds.NODE, call.ConfigEP.Host)
        wanted = model.Endpoint(
            tenant=TenantName(call.TenantName),
            network=NetworkName(call.NetworkName),
            endpoint_id=EndpointId(call.EndpointID),
            group=call.ServiceName or call.ConfigEP.ServiceName,
            # Docker sends the address with its prefix length.
            ip_address=call.ConfigEP.IPAddress.partition("/")[0],
            ipv6_address=call.ConfigEP.IPv6Address.partition("/")[0],
            host=call.ConfigEP.Host,
            vtep_ip=node.value.vtep_ip if node else "",
            container_id=call.ConfigEP.Container,
            container_name=call.EPCommonName,
        )
        endpoint = await self._control.create_endpoint(wanted)
        return json_response({"EndpointConfig": self._endpoint_config(endpoint)})

    async def delete_endpoint(self, request: web.Request) -> web.Response:
        call = await _read(request, DeleteEndpoint)
        endpoint_id = check_endpoint_id(call.EndpointID)
        key = EndpointKey(TenantName(call.TenantName), NetworkName(call.NetworkName), endpoint_id)
        return json_response({"EndpointConfig": self._endpoint_config(await self._control.delete_endpoint(key))})

    async def update_endpoint(self, request: web.Request) -> web.Response:
        call = await _read(request, UpdateEndpoint)
        endpoint = await self._started_endpoint(call) if call.Event == "start" else self._find_endpoint(call)
        endpoint = await self._control.update_endpoint(
            endpoint.key,
            # A dead container provides for no service: without labels no selector matches it.
            labels=call.Labels if call.Event == "start" else {},
            container_id=call.ContainerID or endpoint.container_id,
            container_name=call.EPCommonName or endpoint.container_name,
        )
        return json_response({"IPAddress": endpoint.ip_address})

    async def clean_up(self, request: web.Request) -> web.Response:
        """Delete every endpoint that the path selects; `Conflict` with the ones that failed and why (W14)."""
        tenant, what, name = (request.match_info[part] for part in ("tenant", "what", "id"))
        found = self._selected(tenant, what, name)
        removed: list[str] = []
        failed: dict[str, str] = {}
        for endpoint in found:
            try:
                await self._control.delete_endpoint(endpoint.key)
                removed.append(str(endpoint.key))
            except NotFound:  # deleted by its agent meanwhile
                removed.append(str(endpoint.key))
            except WeftError as error:
                failed[str(endpoint.key)] = error.message
        if failed:
            raise Conflict(f"{len(failed)} of {len(found)} endpoints are still there", details={"failed": failed})
        return json_response({"removed": removed})

    def _selected(self, tenant: str, what: str, name: str) -> list[model.Endpoint]:
        all_endpoints = list(self._cluster.all(kinds.ENDPOINT, tenant))
        if what == "net":
            found = [endpoint for endpoint in all_endpoints if endpoint.network == name]
            known = self._cluster.get(kinds.NETWORK, tenant, name) is not None
        elif what == "group":
            found = [endpoint for endpoint in all_endpoints if endpoint.group == name]
            known = self._cluster.get(kinds.GROUP, tenant, name) is not None
        elif what == "ep":
            found = [endpoint for endpoint in all_endpoints if endpoint.endpoint_id == name]
            known = bool(found)
        else:
            raise Malformed(f"{what[:40]!r} must be net, group or ep", field="what")
        if not known:
            raise NotFound(f"tenant {tenant[:100]!r} has no {what} {name[:200]!r}")
        return found

    async def _started_endpoint(self, call: UpdateEndpoint) -> model.Endpoint:
        """The endpoint. The agent may have returned ADD to the runtime a moment before it publishes the endpoint."""
        backoff = Backoff(first=0.005, cap=0.1, within=PUBLISH_TIMEOUT_S)
        while True:
            try:
                return self._find_endpoint(call)
            except NotFound as unknown:
                try:
                    await backoff.pause()
                except TimeoutError:
                    raise unknown from None

    def _find_endpoint(self, call: UpdateEndpoint) -> model.Endpoint:
        if not (call.EndpointID or call.ContainerID or call.IPAddress):
            raise Invalid("EndpointID is missing: name the endpoint, its container or its address", field="EndpointID")
        for endpoint in self._cluster.all(kinds.ENDPOINT, call.Tenant):
            if call.Network and call.Network not in {endpoint.network, endpoint.group}:
                continue
            if call.EndpointID:
                if endpoint.endpoint_id == call.EndpointID:
                    return endpoint
            elif (call.ContainerID and endpoint.container_id == call.ContainerID) or (
                call.IPAddress and endpoint.ip_address == call.IPAddress
            ):
                return endpoint
        named = call.EndpointID or call.ContainerID or call.IPAddress
        raise NotFound(f"tenant {call.Tenant[:100]!r} has no endpoint {named[:200]!r}")

    def _find_pool(self, network_id: str, pool: str) -> tuple[model.Network, model.Group | None]:
        """The network (and group) of `net.tenant`, `net:group.tenant` or a subnet; `…|pool` is Docker's form (W18)."""
        if network_id:
            # Docker appends `|` and the pool.
            text = network_id.partition("|")[0]
            # Both names may contain dots, so each dot is tried as the separator.
            dots = (position for position, character in enumerate(text) if character == ".")
            named = (self._pool_named(text[:dot], TenantName(text[dot + 1 :])) for dot in dots)
            found = [each for each in named if each is not None]
            if len(found) > 1:
                keys = ", ".join(str(network.key) for network, _ in found)
                raise Conflict(f"NetworkID {network_id[:200]!r} names several networks: {keys}", field="NetworkID")
            if found:
                return found[0]
            raise NotFound(f"NetworkID {network_id[:200]!r} names no network.tenant or network:group.tenant")
        if not pool:
            raise Invalid("NetworkID is missing: name the network, or give its AddressPool", field="NetworkID")
        _, network = self._network_of_pool(pool)
        if network is None:
            raise NotFound(f"no network has the AddressPool {pool[:100]!r}")
        return network, None

    def _network_of_pool(self, pool: str) -> tuple[Subnet, model.Network | None]:
        """The subnet of `subnet` or `subnet:tenant`, and the network that has it."""
        text, _, tenant = pool.partition(":")
        wanted = parse_subnet_v4(text, field="AddressPool")
        networks = self._cluster.all(kinds.NETWORK, *([tenant] if tenant else []))
        return wanted, next((network for network in networks if subnet_of(network, 4) == wanted), None)

    def _pool_named(self, name: str, tenant: TenantName) -> tuple[model.Network, model.Group | None] | None:
        network_name, _, group_name = name.partition(":")
        stored = self._cluster.get(kinds.NETWORK, tenant, network_name)
        if stored is None:
            return None
        group = self._cluster.group(GroupKey(tenant, GroupName(group_name))) if group_name else None
        if group_name and (group is None or group.network != network_name):
            raise NotFound(f"network {network_name!r} of tenant {tenant!r} has no group {group_name!r}")
        return stored.value, group

    def _endpoint_config(self, endpoint: model.Endpoint) -> dict[str, Any]:
        """The endpoint in Contiv's form (contiv 4.3)."""
        group = self._cluster.group(GroupKey(endpoint.tenant, GroupName(endpoint.group))) if endpoint.group else None
        return {
            "id": f"{endpoint.network}.{endpoint.tenant}-{endpoint.endpoint_id}",
            "netID": f"{endpoint.network}.{endpoint.tenant}",
            "endpointID": endpoint.endpoint_id,
            "serviceName": endpoint.group,
            "endpointGroupId": group.group_id if group else 0,
            "endpointGroupKey": f"{endpoint.group}:{endpoint.tenant}" if endpoint.group else "",
            "ipAddress": endpoint.ip_address,
            "ipv6Address": endpoint.ipv6_address,
            "macAddress": endpoint.mac_address,
            "homingHost": endpoint.host,
            "intfName": endpoint.interface,
            "vtepIP": endpoint.vtep_ip,
            "labels": endpoint.labels,
            "containerId": endpoint.container_id,
            "epCommonName": endpoint.container_name,
        }


async def _read(request: web.Request, body: type[B]) -> B:
    if request.content_type != JSON_TYPE:
        raise Malformed(f"Content-Type must be {JSON_TYPE}", field="Content-Type")
    return codec.decode_input(body, await request.read())


def _with_length(network: model.Network, address: Address) -> str:
    subnet = subnet_of(network, address.family)
    assert subnet is not None
    return f"{address}/{subnet.length}"


def _first_of(subnet: Subnet) -> str:
    if subnet.usable.size < 1:
        raise Exhausted(f"AddressPool {subnet} has no usable address", field="AddressPool")
    return f"{Address(4, subnet.usable.first)}/{subnet.length}"
