"""Drops by name: which rule, which pods, which reason."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest
from tests.support.fake_cluster import DEFAULT

from weft.adapters.netns.nft.policy_chains import REASONS
from weft.adapters.ovs.control.trace import NO_WAY
from weft.agent.dataplane.executor import DatapathExecutor
from weft.agent.dataplane.policy import TenantPolicy
from weft.agent.observe.drop_attribution import OWN_REASONS, DropAttributor, DropReader
from weft.agent.observe.drops import DropLog, End
from weft.domain import model
from weft.domain.addresses import Address, parse_address
from weft.domain.desired.state import host_end
from weft.domain.errors import DatapathFault
from weft.domain.ids import TenantName
from weft.domain.policy.model.protocols import ICMP, TCP
from weft.domain.policy.model.rules import Action, Direction, RuleId
from weft.domain.policy.policymap.l4_partition import Outcome
from weft.ports.datapath import Datapath, Drop, PartialResult
from weft.runtime.worker_thread import WorkerThread

if TYPE_CHECKING:
    from tests.unit.agent.conftest import Policed

RULE = "contiv/default/p/no-81"


def address_of(endpoint: model.Endpoint) -> Address:
    return parse_address(endpoint.ip_address, field="ipAddress")


def naming(policed: Policed) -> DropAttributor:
    return DropAttributor(policed.world.cluster, journal=policed.journal, policies=policed.policies.by_tenant)


def test_a_drop_has_the_rule_and_the_pods_at_both_ends(policed: Policed) -> None:
    drop = Drop(
        tenant=DEFAULT,
        outcome=policed.number(RULE),
        reason="",
        source=address_of(policed.away),
        target=address_of(policed.till),
        protocol=TCP,
        source_port=4711,
        target_port=81,
        at=12.5,
    )
    (named,) = naming(policed).name([drop])
    assert (named.at, named.rule, named.direction, named.service) == (12.5, RULE, "ingress", "tcp/81")
    assert named.reason == "the rule denies it (ingress of the side that answers)"
    assert named.source == End(address=policed.away.ip_address, port=4711, identity="default:blue:away")
    assert (named.target.identity, named.target.pod) == ("default:blue:till", "lab/till")


def test_who_forges_its_address_is_named_by_its_port(policed: Policed) -> None:
    drop = Drop(
        tenant=DEFAULT,
        outcome=0,
        reason="weft/spoofed",
        source=address_of(policed.till),
        target=parse_address("192.0.2.1", field=""),
        protocol=ICMP,
        in_iface=host_end(policed.guest.key),
    )
    (named,) = naming(policed).name([drop])
    assert (named.rule, named.direction, named.service) == ("weft/spoofed", "", "icmp")
    assert "not its own" in named.reason
    assert (named.source.address, named.source.pod) == (policed.till.ip_address, "lab/guest")
    assert (named.target.identity, named.target.pod) == ("192.0.2.1", "")


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ("k8s/shop/closed/ingress/isolation", "denied by default: no rule allows it"),
        ("contiv/default/p/isolation", "the rule denies it"),
    ],
)
def test_a_default_deny_is_told_as_one(policed: Policed, rule: str, words: str) -> None:
    known = policed.policies.by_tenant[DEFAULT]
    outcomes = {1: Outcome(RuleId(rule), Action.DENY, Direction.INGRESS)}
    policy = cast("TenantPolicy", SimpleNamespace(engine=known.engine, tables=SimpleNamespace(outcomes=outcomes)))
    names = DropAttributor(policed.world.cluster, journal=policed.journal, policies={DEFAULT: policy})
    source, target = address_of(policed.guest), address_of(policed.till)
    drop = Drop(tenant=DEFAULT, outcome=1, reason="", source=source, target=target, protocol=TCP, target_port=80)
    (named,) = names.name([drop])
    assert named.rule == rule
    assert named.reason == f"{words} (ingress of the side that answers)"


def test_every_reason_of_the_datapaths_has_words() -> None:
    assert {*REASONS.values(), NO_WAY} == set(OWN_REASONS)


@pytest.mark.parametrize("tenant", ["default", "nobody"])
def test_what_is_not_known_any_more_is_told_all_the_same(policed: Policed, tenant: str) -> None:
    address = parse_address("192.0.2.1", field="")
    drop = Drop(tenant=TenantName(tenant), outcome=0x8000_0FFF, reason="", source=address, target=address, protocol=TCP)
    (named,) = naming(policed).name([drop])
    assert named.rule == "weft/unknown"
    assert "0x80000fff" in named.reason


class Deaf:
    """A datapath that cannot tell of drops for as long as somebody else listens."""

    def __init__(self) -> None:
        self.reason = ""
        self.told: list[Drop] = []

    def drops(self) -> list[Drop]:
        if self.reason:
            raise DatapathFault(self.reason)
        return self.told


async def test_a_datapath_that_tells_nothing_is_complained_of_once(
    policed: Policed, caplog: pytest.LogCaptureFixture
) -> None:
    log, datapath = DropLog(), Deaf()
    source, target = address_of(policed.guest), address_of(policed.till)
    datapath.told = [Drop(tenant=DEFAULT, outcome=0, reason="weft/invalid", source=source, target=target, protocol=TCP)]
    with WorkerThread("kernel") as thread:
        hearing = DropReader(DatapathExecutor(cast("Datapath", datapath), thread), naming=naming(policed), drops=log)
        for reason, complaints, heard in (("", 0, 1), ("busy", 1, 1), ("busy", 1, 1), ("", 1, 2), ("busy", 2, 2)):
            datapath.reason = reason
            await hearing.listen()
            assert [record.levelname for record in caplog.records] == ["ERROR"] * complaints
            assert log.total == heard


async def test_what_one_tenant_cannot_tell_takes_nothing_from_the_others(policed: Policed) -> None:
    log, address = DropLog(), address_of(policed.guest)
    drop = Drop(tenant=DEFAULT, outcome=0, reason="weft/invalid", source=address, target=address, protocol=TCP)

    class HalfDeaf:
        def drops(self) -> list[Drop]:
            raise PartialResult("tenant red: busy", [drop])

    with WorkerThread("kernel") as thread:
        hearing = DropReader(DatapathExecutor(cast("Datapath", HalfDeaf()), thread), naming=naming(policed), drops=log)
        await hearing.listen()
    assert log.total == 1
