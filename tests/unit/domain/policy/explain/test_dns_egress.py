"""A resolver obeys the egress rules of whoever it asks for (CVE-2024-29018)."""

from __future__ import annotations

import msgspec
import pytest
from tests.support.fake_cluster import endpoint, group, network, policy, rule

from weft.domain import model
from weft.domain.addresses import parse_address
from weft.domain.ids import NodeName
from weft.domain.policy.engine.engine import Engine
from weft.domain.policy.explain.dns_egress import kept_in_by

HERE = NodeName("here")
RESOLVERS = (parse_address("192.0.2.53", field="test"), parse_address("2001:db8::53", field="test"))


def member(name: str = "e1", *, host: str = HERE) -> model.Endpoint:
    made = endpoint(name, group="web", address="10.1.1.5", address_v6="fd00::5")
    return msgspec.structs.replace(made, host=host)


def engine(*rules: model.Rule) -> Engine:
    return Engine([network(), policy(), group(policies=("p",)), *rules, member(), member("e2", host="there")])


@pytest.mark.parametrize(
    ("rules", "kept"),
    [
        pytest.param((), False, id="no rules"),
        pytest.param((rule("1", direction="out", action="deny"),), True, id="no way out"),
        pytest.param((rule("1", direction="in", action="deny"),), False, id="no way in"),
        pytest.param((rule("1", direction="out", action="deny", protocol="tcp", port=80),), False, id="no web"),
        pytest.param((rule("1", direction="out", action="deny", protocol="udp", port=53),), True, id="no DNS"),
        pytest.param(
            (rule("1", direction="out", action="deny", to_ip_address="192.0.2.53"),), False, id="no first one"
        ),
        pytest.param(
            (
                rule("1", direction="out", action="deny"),
                rule("2", direction="out", action="allow", priority=9, to_ip_address="192.0.2.0/24"),
            ),
            False,
            id="a hole for the resolver",
        ),
    ],
)
def test_who_may_not_ask_by_itself_is_not_asked_for(rules: tuple[model.Rule, ...], kept: bool) -> None:
    dns_egress_denied = kept_in_by(engine(*rules), node=HERE, resolvers=RESOLVERS)
    assert dns_egress_denied(member()) is kept
    assert dns_egress_denied(member("e2", host="there")) is False


def test_a_workload_without_rules_yet_asks_nobody() -> None:
    assert kept_in_by(engine(), node=HERE, resolvers=RESOLVERS)(member("new")) is True


def test_without_resolvers_there_is_nobody_to_ask() -> None:
    assert kept_in_by(engine(), node=HERE, resolvers=())(member()) is True
