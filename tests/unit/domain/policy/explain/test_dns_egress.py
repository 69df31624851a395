"""DNS forwarding obeys the egress rules of the querying workload (CVE-2024-29018)."""

from __future__ import annotations

import msgspec
import pytest
from tests.support.fake_cluster import endpoint, group, network, policy, rule

from weft.domain import model
from weft.domain.addresses import parse_address
from weft.domain.dns.names import Transports
from weft.domain.ids import NodeName
from weft.domain.policy.engine.engine import Engine
from weft.domain.policy.explain.dns_egress import dns_egress_denied_by

HERE = NodeName("here")
RESOLVERS = (parse_address("192.0.2.53", field="test"), parse_address("2001:db8::53", field="test"))


def member(name: str = "e1", *, host: str = HERE) -> model.Endpoint:
    created = endpoint(name, group="web", address="10.1.1.5", address_v6="fd00::5")
    return msgspec.structs.replace(created, host=host)


def engine(*rules: model.Rule) -> Engine:
    return Engine([network(), policy(), group(policies=("p",)), *rules, member(), member("e2", host="there")])


@pytest.mark.parametrize(
    ("rules", "denied"),
    [
        pytest.param((), Transports.NONE, id="no rules"),
        pytest.param((rule("1", direction="out", action="deny"),), Transports.BOTH, id="deny all egress"),
        pytest.param((rule("1", direction="in", action="deny"),), Transports.NONE, id="deny all ingress"),
        pytest.param(
            (rule("1", direction="out", action="deny", protocol="tcp", port=80),), Transports.NONE, id="deny HTTP"
        ),
        pytest.param(
            (rule("1", direction="out", action="deny", protocol="udp", port=53),), Transports.UDP, id="deny UDP 53"
        ),
        pytest.param(
            (rule("1", direction="out", action="deny", protocol="tcp", port=53),), Transports.TCP, id="deny TCP 53"
        ),
        pytest.param(
            (
                rule("1", direction="out", action="deny"),
                rule("2", direction="out", action="allow", priority=9, protocol="udp", port=53),
            ),
            Transports.TCP,
            id="allow UDP 53 only",
        ),
        pytest.param(
            (rule("1", direction="out", action="deny", to_ip_address="192.0.2.53"),),
            Transports.NONE,
            id="deny the first resolver",
        ),
        pytest.param(
            (
                rule("1", direction="out", action="deny"),
                rule("2", direction="out", action="allow", priority=9, to_ip_address="192.0.2.0/24"),
            ),
            Transports.NONE,
            id="allow the resolver",
        ),
    ],
)
def test_dns_egress_is_denied_if_the_workload_may_reach_no_resolver(
    rules: tuple[model.Rule, ...], denied: Transports
) -> None:
    dns_egress_denied = dns_egress_denied_by(engine(*rules), node=HERE, resolvers=RESOLVERS)
    assert dns_egress_denied(member()) is denied
    assert dns_egress_denied(member("e2", host="there")) is Transports.NONE


def test_dns_egress_is_denied_for_a_workload_unknown_to_the_engine() -> None:
    assert dns_egress_denied_by(engine(), node=HERE, resolvers=RESOLVERS)(member("new")) is Transports.BOTH


def test_dns_egress_is_denied_without_resolvers() -> None:
    assert dns_egress_denied_by(engine(), node=HERE, resolvers=())(member()) is Transports.BOTH
