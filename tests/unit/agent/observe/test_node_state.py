"""Differences between kernel and attachment store."""

from __future__ import annotations

from weft.agent.observe.node_state import find_inconsistencies
from weft.agent.store.attachment_store import Attachment, AttachmentStore, Stage
from weft.domain import model
from weft.domain.desired.state import port_of
from weft.domain.ids import EndpointId, NetworkName, TenantName
from weft.ports.datapath import EndpointConfig, TenantNetnsReport

BLUE = TenantName("blue")


def note(name: str, stage: Stage) -> Attachment:
    endpoint = model.Endpoint(
        tenant=BLUE,
        network=NetworkName("net"),
        endpoint_id=EndpointId(name),
        container_id=name,
        interface="eth0",
    )
    config = EndpointConfig(port=port_of(endpoint), netns="/x", interface="eth0", addresses=(), mtu=1450)
    return Attachment(endpoint=endpoint, published=True, stage=stage, config=config)


def reports(*ports: str) -> list[TenantNetnsReport]:
    return [TenantNetnsReport(tenant=BLUE, ports=ports, devices=("wx1",))]


def device(each: Attachment) -> str:
    assert each.config is not None
    return each.config.port.interface


def test_an_attachment_with_its_device_is_consistent() -> None:
    attachment_store, attached = AttachmentStore(), note("a", Stage.ATTACHED)
    attachment_store.put(attached)
    assert find_inconsistencies(attachment_store, reports(device(attached))) == []


def test_an_attachment_being_configured_may_have_its_device_or_not() -> None:
    attachment_store, config = AttachmentStore(), note("a", Stage.CONFIGURING)
    attachment_store.put(config)
    assert (
        find_inconsistencies(attachment_store, reports())
        == find_inconsistencies(attachment_store, reports(device(config)))
        == []
    )


def test_foreign_devices_and_lost_devices_are_reported() -> None:
    attachment_store, attached = AttachmentStore(), note("a", Stage.ATTACHED)
    attachment_store.put(attached)
    assert find_inconsistencies(attachment_store, reports("wpother")) == [
        "device wpother of tenant blue belongs to no attachment",
        f"attachment a has lost its device {device(attached)}",
    ]
