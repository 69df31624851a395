"""Infra networks (contiv 6.4): the host itself is attached to each, with an interface named after the network."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Final, Protocol

import msgspec

from weft.agent.store.attachment_store import AttachmentStore, Stage
from weft.domain import kinds, model
from weft.domain.cluster import Cluster
from weft.domain.errors import WeftError
from weft.domain.ids import EndpointId, NodeName
from weft.ports.datapath import EndpointConfig
from weft.runtime.backoff import wait_event
from weft.runtime.logs import Log

log = Log("infra")

# The netns of the host, which is the agent's own.
HOST_NETNS: Final = "/proc/thread-self/ns/net"
# How soon a network whose attachment failed is retried.
RETRY_S = 1.0
# IFNAMSIZ without the terminating zero.
_MAX_INTERFACE_NAME = 15
_DIGEST = 6


def interface_name(network: str) -> str:
    """The network's name; a name too long for an interface is cut, and ends in a digest of the whole (W36)."""
    if len(network) <= _MAX_INTERFACE_NAME:
        return network
    digest = hashlib.sha256(network.encode()).hexdigest()[:_DIGEST]
    return f"{network[: _MAX_INTERFACE_NAME - _DIGEST - 1]}-{digest}"


def host_endpoint(network: model.Network, node: NodeName) -> model.Endpoint:
    """The host as an endpoint of a network. Its id is the node's name, not the machine's host name (W36)."""
    return model.Endpoint(
        tenant=network.tenant,
        network=network.name,
        endpoint_id=EndpointId(node),
        host=node,
        interface=interface_name(network.name),
        container_id=node,
    )


def host_config(config: EndpointConfig, network: model.Network) -> EndpointConfig:
    """The endpoint config for the host's netns: without a default route, which would replace the machine's own."""
    alt_ifname = network.name if config.interface != network.name else ""
    return msgspec.structs.replace(config, default_route=False, alt_ifname=alt_ifname)


class HostAttachments(Protocol):
    """The part of `weft.agent.cni.attachments.Attachments` that is used here."""

    @property
    def ready(self) -> asyncio.Event: ...

    async def attach_host(self, network: model.Network) -> None: ...


class InfraAttacher:
    """Keeps the host attached to every infra network. `Evictions` detaches it from deleted ones."""

    def __init__(
        self,
        *,
        cluster: Cluster,
        node: NodeName,
        attachment_store: AttachmentStore,
        attachments: HostAttachments,
        networks_changed: asyncio.Event,
    ) -> None:
        self._cluster = cluster
        self._node = node
        self._attachment_store = attachment_store
        self._attachments = attachments
        self._networks_changed = networks_changed
        self._logged = ""

    async def run(self) -> None:
        """Attach the host to new networks until cancelled."""
        await self._attachments.ready.wait()
        while True:
            if await self._attach_all():
                await self._networks_changed.wait()
            else:
                await wait_event(self._networks_changed, within=RETRY_S)
            self._networks_changed.clear()

    async def _attach_all(self) -> bool:
        """Whether the host is attached to all infra networks now."""
        succeeded = True
        # A list: the cluster may change while an attachment is awaited.
        for network in [network for network in self._cluster.all(kinds.NETWORK) if network.nw_type == "infra"]:
            attachment = self._attachment_store.get(host_endpoint(network, self._node).key)
            if attachment is not None and attachment.stage is Stage.ATTACHED:
                continue
            try:
                await self._attachments.attach_host(network)
            except WeftError as error:
                succeeded = False
                self._log_once(f"{network.key}: {error.message}")
        return succeeded

    def _log_once(self, reason: str) -> None:
        """A network that fails at every retry gets one line, not one per second."""
        if reason != self._logged:
            log.warning("attaching the host to an infra network failed", reason=reason)
            self._logged = reason
