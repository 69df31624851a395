"""Where kernel and ledger disagree."""

from __future__ import annotations

from weft.agent.rest import leaks
from weft.agent.store.attachment_store import Attachment, AttachmentStore, Stage
from weft.domain import model
from weft.domain.desired.state import port_of
from weft.domain.ids import EndpointId, NetworkName, TenantName
from weft.ports.datapath import EndpointConfig, SpaceSurvey

BLUE = TenantName("blue")


def note(name: str, stage: Stage) -> Attachment:
    endpoint = model.Endpoint(
        tenant=BLUE,
        network=NetworkName("net"),
        endpoint_id=EndpointId(name),
        container_id=name,
        interface="eth0",
    )
    wiring = EndpointConfig(port=port_of(endpoint), netns="/x", interface="eth0", addresses=(), mtu=1450)
    return Attachment(endpoint=endpoint, published=True, stage=stage, wiring=wiring)


def space(*ports: str) -> list[SpaceSurvey]:
    return [SpaceSurvey(tenant=BLUE, ports=ports, devices=("wx1",))]


def device(each: Attachment) -> str:
    assert each.wiring is not None
    return each.wiring.port.interface


def test_what_is_attached_and_there_is_no_leak() -> None:
    journal, attached = AttachmentStore(), note("a", Stage.ATTACHED)
    journal.put(attached)
    assert leaks(journal, space(device(attached))) == []


def test_what_is_just_being_wired_may_be_there_or_not() -> None:
    journal, wiring = AttachmentStore(), note("a", Stage.WIRING)
    journal.put(wiring)
    assert leaks(journal, space()) == leaks(journal, space(device(wiring))) == []


def test_both_kinds_of_leaks_are_named() -> None:
    journal, attached = AttachmentStore(), note("a", Stage.ATTACHED)
    journal.put(attached)
    assert leaks(journal, space("wpother")) == [
        "device wpother of tenant blue belongs to no attachment",
        f"attachment a has lost its device {device(attached)}",
    ]
