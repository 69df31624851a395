"""The drop log: attribution to rules and pods, the latest drops, and followers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest
from tests.support.fake_cluster import DEFAULT

from weft.adapters.netns.drop_reasons import DROP_REASONS, NO_ROUTE
from weft.agent.dataplane.executor import DatapathExecutor
from weft.agent.dataplane.policy import TenantPolicy
from weft.agent.observe.drops import (
    DROP_REASON_TEXTS,
    MAX_FOLLOWERS,
    MAX_RECORDS,
    MAX_UNREAD,
    STOPPING,
    TOO_SLOW,
    DropAttributor,
    DropFilter,
    DropLog,
    DropReader,
    DropRecord,
    End,
)
from weft.domain import model
from weft.domain.addresses import Address, parse_address
from weft.domain.desired.state import host_ifname
from weft.domain.errors import DatapathFault, Unavailable
from weft.domain.ids import TenantName
from weft.domain.policy.model.protocols import ICMP, TCP
from weft.domain.policy.model.rules import Action, Direction, RuleId
from weft.domain.policy.policymap.l4_partition import Verdict
from weft.ports.datapath import Datapath, Drop, PartialResult
from weft.runtime.worker_thread import WorkerThread

if TYPE_CHECKING:
    from tests.unit.agent.conftest import Policed

RULE = "contiv/default/p/no-81"


def record(number: int = 0, *, tenant: str = "default", pod: str = "lab/a") -> DropRecord:
    end = End(address=f"10.1.1.{number % 250}", port=number, identity=f"{tenant}:net:a", pod=pod)
    return DropRecord(
        at=float(number), tenant=TenantName(tenant), rule="r", reason="", protocol=TCP, service="tcp/1",
        source=end, target=end,
    )  # fmt: skip


def test_the_latest_drops_are_kept() -> None:
    log = DropLog()
    log.add(record(number) for number in range(MAX_RECORDS + 5))
    assert [drop.at for drop in log.recent(DropFilter())] == [float(number) for number in range(5, MAX_RECORDS + 5)]
    assert log.total == MAX_RECORDS + 5
    assert len(log.recent(DropFilter(since=MAX_RECORDS))) == 5


@pytest.mark.parametrize("pod", ["lab/a", "a", "default:net:a", "10.1.1.0"])
def test_drops_are_filtered_by_tenant_and_pod(pod: str) -> None:
    log = DropLog()
    log.add([record(), record(1, tenant="blue", pod="lab/b")])
    assert [drop.tenant for drop in log.recent(DropFilter(tenant="default", pod=pod))] == ["default"]
    assert [drop.tenant for drop in log.recent(DropFilter(pod="b"))] == ["blue"]
    assert log.recent(DropFilter(tenant="blue", pod="lab/a")) == []
    assert log.recent(DropFilter(pod="c")) == []


async def test_a_follower_gets_matching_drops_from_now_on() -> None:
    log = DropLog()
    log.add([record(1)])
    with log.following(DropFilter(tenant="default")) as follower:
        log.add([record(2), record(3, tenant="blue"), record(4)])
        assert [drop.at for drop in await follower.take(within=30)] == [2.0, 4.0]
        assert await follower.take(within=0.01) == []
        log.end_all()
        assert await follower.take(within=30) == []
        assert follower.ended == STOPPING


async def test_only_a_follower_that_does_not_read_is_disconnected() -> None:
    log = DropLog()
    with log.following(DropFilter()) as slow, log.following(DropFilter()) as quick:
        for number in range(MAX_UNREAD + 1):
            log.add([record(number)])
            await quick.take(within=30)
        log.add([record()])
        assert (slow.ended, quick.ended) == (TOO_SLOW, "")
        assert len(await slow.take(within=30)) == MAX_UNREAD
        assert len(await quick.take(within=30)) == 1


def test_the_number_of_followers_is_limited() -> None:
    log = DropLog()
    followings = [log.following(DropFilter()) for _ in range(MAX_FOLLOWERS)]
    for each in followings:
        each.__enter__()
    with pytest.raises(Unavailable), log.following(DropFilter()):
        pass
    for each in followings:
        each.__exit__(None, None, None)
    with log.following(DropFilter()):
        pass


def address_of(endpoint: model.Endpoint) -> Address:
    return parse_address(endpoint.ip_address, field="ipAddress")


def attributor(policed: Policed) -> DropAttributor:
    return DropAttributor(
        policed.world.cluster, attachment_store=policed.attachment_store, policies=policed.policies.by_tenant
    )


def test_a_drop_has_the_rule_and_the_pods_at_both_ends(policed: Policed) -> None:
    drop = Drop(
        tenant=DEFAULT,
        verdict_id=policed.number(RULE),
        reason="",
        source=address_of(policed.away),
        target=address_of(policed.till),
        protocol=TCP,
        source_port=4711,
        target_port=81,
        at=12.5,
    )
    (named,) = attributor(policed).attribute([drop])
    assert (named.at, named.rule, named.direction, named.service) == (12.5, RULE, "ingress", "tcp/81")
    assert named.reason == "the rule denies it (ingress at destination)"
    assert named.source == End(address=policed.away.ip_address, port=4711, identity="default:blue:away")
    assert (named.target.identity, named.target.pod) == ("default:blue:till", "lab/till")


def test_a_spoofed_packet_is_attributed_by_its_port(policed: Policed) -> None:
    drop = Drop(
        tenant=DEFAULT,
        verdict_id=0,
        reason="weft/spoofed",
        source=address_of(policed.till),
        target=parse_address("192.0.2.1", field=""),
        protocol=ICMP,
        in_iface=host_ifname(policed.guest.key),
    )
    (named,) = attributor(policed).attribute([drop])
    assert (named.rule, named.direction, named.service) == ("weft/spoofed", "", "icmp")
    assert "not the sender's own" in named.reason
    assert (named.source.address, named.source.pod) == (policed.till.ip_address, "lab/guest")
    assert (named.target.identity, named.target.pod) == ("192.0.2.1", "")


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ("k8s/shop/closed/ingress/isolation", "denied by default: no rule allows it"),
        ("contiv/default/p/isolation", "the rule denies it"),
    ],
)
def test_a_default_deny_is_reported_as_one(policed: Policed, rule: str, words: str) -> None:
    known = policed.policies.by_tenant[DEFAULT]
    verdicts = {1: Verdict(RuleId(rule), Action.DENY, Direction.INGRESS)}
    policy = cast("TenantPolicy", SimpleNamespace(engine=known.engine, policy_map=SimpleNamespace(verdicts=verdicts)))
    names = DropAttributor(policed.world.cluster, attachment_store=policed.attachment_store, policies={DEFAULT: policy})
    source, target = address_of(policed.guest), address_of(policed.till)
    drop = Drop(tenant=DEFAULT, verdict_id=1, reason="", source=source, target=target, protocol=TCP, target_port=80)
    (named,) = names.attribute([drop])
    assert named.rule == rule
    assert named.reason == f"{words} (ingress at destination)"


def test_every_drop_reason_has_a_text() -> None:
    assert {*DROP_REASONS.values(), NO_ROUTE} == set(DROP_REASON_TEXTS)


@pytest.mark.parametrize("tenant", ["default", "deleted"])
def test_a_drop_by_a_deleted_rule_or_tenant_is_recorded(policed: Policed, tenant: str) -> None:
    address = parse_address("192.0.2.1", field="")
    drop = Drop(
        tenant=TenantName(tenant), verdict_id=0x8000_0FFF, reason="", source=address, target=address, protocol=TCP
    )
    (named,) = attributor(policed).attribute([drop])
    assert named.rule == "weft/unknown"
    assert "0x80000fff" in named.reason


class BusyDatapath:
    """A datapath whose drop log is unavailable while `reason` is set."""

    def __init__(self) -> None:
        self.reason = ""
        self.logged: list[Drop] = []

    def drops(self) -> list[Drop]:
        if self.reason:
            raise DatapathFault(self.reason)
        return self.logged


async def test_an_unavailable_drop_log_is_reported_once(policed: Policed, caplog: pytest.LogCaptureFixture) -> None:
    log, datapath = DropLog(), BusyDatapath()
    source, target = address_of(policed.guest), address_of(policed.till)
    datapath.logged = [
        Drop(tenant=DEFAULT, verdict_id=0, reason="weft/invalid", source=source, target=target, protocol=TCP)
    ]
    with WorkerThread("kernel") as thread:
        reader = DropReader(
            DatapathExecutor(cast("Datapath", datapath), thread), attributor=attributor(policed), drops=log
        )
        for reason, errors, total in (("", 0, 1), ("busy", 1, 1), ("busy", 1, 1), ("", 1, 2), ("busy", 2, 2)):
            datapath.reason = reason
            await reader.poll()
            assert [record.levelname for record in caplog.records] == ["ERROR"] * errors
            assert log.total == total


async def test_a_partial_result_is_recorded(policed: Policed) -> None:
    log, address = DropLog(), address_of(policed.guest)
    drop = Drop(tenant=DEFAULT, verdict_id=0, reason="weft/invalid", source=address, target=address, protocol=TCP)

    class PartlyBusyDatapath:
        def drops(self) -> list[Drop]:
            raise PartialResult("tenant red: busy", [drop])

    with WorkerThread("kernel") as thread:
        reader = DropReader(
            DatapathExecutor(cast("Datapath", PartlyBusyDatapath()), thread), attributor=attributor(policed), drops=log
        )
        await reader.poll()
    assert log.total == 1
