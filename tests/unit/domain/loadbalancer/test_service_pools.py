"""The provider index of Contiv services, compared with the plain rule (W15, W21, W22)."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.domain import model
from weft.domain.addresses import Address, parse_address
from weft.domain.errors import Invalid
from weft.domain.ids import EndpointId, EndpointKey, NetworkName, ServiceName, TenantName
from weft.domain.loadbalancer.service_pools import Providers, frontends_of, pools_of
from weft.domain.loadbalancer.state import FrontendKey
from weft.domain.loadbalancer.table import Pool, Target, pool_of
from weft.domain.policy.model.protocols import TCP, UDP
from weft.domain.selectors import parse_pairs

BLUE, NET = TenantName("blue"), NetworkName("net")
LABELS = st.dictionaries(st.sampled_from("abc"), st.sampled_from("xy"), max_size=3)


def service(name: str = "shop", *, selectors: tuple[str, ...] = ("app=web",), vip: str = "10.1.0.9") -> model.Service:
    return model.Service(
        tenant=BLUE,
        name=ServiceName(name),
        network=NET,
        selectors=selectors,
        ports=("80:8080:TCP", "643:7070:UDP"),
        vip=vip,
    )


def endpoint(number: int, labels: dict[str, str]) -> model.Endpoint:
    return model.Endpoint(
        tenant=BLUE,
        network=NET,
        endpoint_id=EndpointId(f"e{number}"),
        ip_address=f"10.1.0.{number}",
        ipv6_address=f"fd00::{number}",
        labels=labels,
    )


def key(number: int) -> EndpointKey:
    return EndpointKey(BLUE, NET, EndpointId(f"e{number}"))


def addresses_of(*endpoints: model.Endpoint) -> list[Address]:
    return [address for each in endpoints for address in each.addresses]


CHANGES = st.lists(
    st.tuples(st.just("service"), st.integers(0, 2), LABELS.filter(bool) | st.none())
    | st.tuples(st.just("endpoint"), st.integers(1, 3), LABELS | st.none()),
    max_size=15,
)


@given(CHANGES)
def test_the_index_agrees_with_the_rule(changes: list[tuple[str, int, dict[str, str] | None]]) -> None:
    """W22: containment, whichever was created first; W15: nothing is left of a removed endpoint."""
    providers = Providers()
    services: dict[str, model.Service] = {}
    endpoints: dict[int, model.Endpoint] = {}
    known: dict[str, dict[FrontendKey, Pool]] = {}
    for kind, number, labels in changes:
        if kind == "endpoint" and labels is None:
            providers.remove_endpoint(key(number))
            endpoints.pop(number, None)
        elif kind == "endpoint":
            endpoints[number] = endpoint(number, labels or {})
            providers.put_endpoint(endpoints[number])
        elif labels is None:
            providers.remove_service(f"s{number}")
            services.pop(f"s{number}", None)
        else:
            created = service(f"s{number}", selectors=tuple(f"{name}={value}" for name, value in labels.items()))
            services[created.name] = created
            providers.put_service(created)
        for name, pools in providers.take_changes():
            known.pop(name, None)
            if pools is not None:
                known[name] = pools
    assert known.keys() == services.keys()
    for name, created in services.items():
        selector = parse_pairs(created.selectors)
        matching = [each for each in endpoints.values() if each.labels and selector.matches(each.labels)]
        assert known[name] == pools_of(frontends_of(created), addresses_of(*matching))


def test_only_affected_services_are_returned() -> None:
    providers = Providers()
    for number in range(3):
        providers.put_service(service(f"s{number}", selectors=(f"app=a{number}", "env=prod")))
    assert {name for name, _ in providers.take_changes()} == {"s0", "s1", "s2"}
    providers.put_endpoint(endpoint(1, {"app": "a1", "env": "prod", "more": "labels"}))
    assert [name for name, _ in providers.take_changes()] == ["s1"]
    providers.put_endpoint(endpoint(1, {"app": "a1", "env": "prod", "more": "labels"}))
    providers.put_endpoint(endpoint(2, {"env": "prod"}))
    assert list(providers.take_changes()) == []


def test_ports_become_frontends_of_the_vip() -> None:
    vip, target = parse_address("10.1.0.9", field="vip"), parse_address("10.1.0.1", field="pod")
    assert pools_of(frontends_of(service()), [target]) == {
        FrontendKey(vip, TCP, 80): pool_of([Target(target, 8080)]),
        FrontendKey(vip, UDP, 643): pool_of([Target(target, 7070)]),
    }
    assert pools_of(frontends_of(service(vip="")), [target]) == {}


def test_each_address_has_the_backends_of_its_family() -> None:
    both = msgspec.structs.replace(service(), ipv6_vip="fd00::9", ports=("80:8080:TCP",))
    v4_only = msgspec.structs.replace(endpoint(2, {}), ipv6_address="")
    pods = {text: Target(parse_address(text, field="pod"), 8080) for text in ("10.1.0.1", "10.1.0.2", "fd00::1")}
    assert pools_of(frontends_of(both), addresses_of(endpoint(1, {}), v4_only)) == {
        FrontendKey(parse_address("10.1.0.9", field="vip"), TCP, 80): pool_of([pods["10.1.0.1"], pods["10.1.0.2"]]),
        FrontendKey(parse_address("fd00::9", field="vip"), TCP, 80): pool_of([pods["fd00::1"]]),
    }


@pytest.mark.parametrize("ports", [(), ("80",), ("80:8080",), ("80:8080:icmp",), ("0:8080:TCP",), ("x:y:TCP",)])
def test_an_invalid_service_is_removed(ports: tuple[str, ...]) -> None:
    """W21: it is rejected as a whole, and its former version is removed."""
    providers = Providers()
    providers.put_service(service())
    list(providers.take_changes())
    broken = model.Service(
        tenant=BLUE, name=ServiceName("shop"), network=NET, selectors=("app=web",), ports=ports, vip="10.1.0.9"
    )
    with pytest.raises(Invalid):
        providers.put_service(broken)
    assert list(providers.take_changes()) == [("shop", None)]


def test_the_spelling_of_a_protocol_does_not_matter() -> None:
    """W21: a protocol in lower case works like one in upper case."""
    providers = Providers()
    providers.put_service(
        model.Service(
            tenant=BLUE, name=ServiceName("s"), network=NET, selectors=("a=b",), ports=("80:81:udp",), vip="10.1.0.9"
        )
    )
    ((_, pools),) = providers.take_changes()
    assert pools is not None
    assert [frontend.protocol for frontend in pools] == [UDP]
