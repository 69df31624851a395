"""Fixture: the policy of one node. The group `shop` is denied TCP to port 81 from the group `guests`."""

from __future__ import annotations

import msgspec
import pytest
from tests.support.fake_cluster import DEFAULT, FakeCluster, group, network, policy, rule

from weft.agent.dataplane.policy import Policies
from weft.agent.store.attachment_store import Attachment, AttachmentStore, Stage
from weft.domain import model
from weft.domain.desired.state import Port, host_ifname
from weft.domain.ids import NodeName, TenantName
from weft.domain.policy.model.rules import Action
from weft.domain.policy.policymap.l4_partition import Verdict
from weft.ports.datapath import EndpointConfig

NODE = NodeName("one")


class Policed:
    """The cluster, the attachments of this node and the policy that follows from them.

    `till` and `guest` are here, `away` is a guest on another node. The policy `idea` is in audit mode and denies port
    8080.
    """

    def __init__(self) -> None:
        self.world = FakeCluster()
        self.world.put(network("blue", "10.1.1.0/24", ipv6_subnet="2001:db8:1::/64"))
        for name, number, mode in (("p", 81, "enforce"), ("idea", 8080, "audit")):
            self.world.put(policy(name, mode=mode))
            self.world.put(rule(f"no-{number}", policy=name, action="deny", protocol="tcp", port=number))
        self.world.put(group("shop", policies=("p", "idea")))
        self.world.put(group("guests"))
        self.attachment_store = AttachmentStore()
        self.till, self.guest = self._attach("till", "shop"), self._attach("guest", "guests")
        self.away = self.world.attach("away", group="guests")
        self.policies = Policies(self.world.cluster, node=NODE, attachment_store=self.attachment_store)
        self.policies.refresh({DEFAULT})

    def _attach(self, name: str, group_name: str) -> model.Endpoint:
        made = self.world.attach(name, group=group_name)
        endpoint = msgspec.structs.replace(made, container_id=name, container_name=f"lab/{name}", host=NODE)
        port = Port(DEFAULT, host_ifname(endpoint.key), "02:00:00:00:00:01", tuple(endpoint.addresses))
        config = EndpointConfig(port=port, netns=f"/paper/{name}", interface="eth0", addresses=(), mtu=1450)
        self.attachment_store.put(Attachment(endpoint=endpoint, published=True, stage=Stage.ATTACHED, config=config))
        return endpoint

    def number(self, wanted: str, action: Action = Action.DENY, audit_deny: str | None = None) -> int:
        """The number of the verdict of a rule."""
        return next(number for number, each in self._verdicts.items() if _is(each, wanted, action, audit_deny))

    @property
    def _verdicts(self) -> dict[int, Verdict]:
        return dict(self.policies.by_tenant[TenantName(DEFAULT)].policy_map.verdicts)


def _is(verdict: Verdict, wanted: str, action: Action, audit_deny: str | None) -> bool:
    return (verdict.rule, verdict.action, verdict.audit_deny) == (wanted, action, audit_deny)


@pytest.fixture
def policed() -> Policed:
    return Policed()
