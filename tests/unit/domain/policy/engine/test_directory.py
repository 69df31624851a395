"""Naming the ends of a flow: by key, by address, within a tenant."""

from __future__ import annotations

import pytest

from weft.domain.errors import Invalid, NotFound
from weft.domain.ids import EndpointId, NetworkName, TenantName
from weft.domain.model import Endpoint
from weft.domain.policy.engine.engine import Engine
from weft.domain.policy.model.identities import ApiServer, Host, Kind, Pod


def endpoint(tenant: str) -> Endpoint:
    return Endpoint(
        tenant=TenantName(tenant), network=NetworkName("net"), endpoint_id=EndpointId("e"), ip_address="10.1.1.1"
    )


@pytest.fixture
def engine() -> Engine:
    return Engine(
        [
            endpoint("default"),
            endpoint("red"),
            Pod(namespace="x", name="a", ips=("10.9.0.1", "fd00::1")),
            Pod(namespace="x", name="six", ips=("fd00::6",)),
            Pod(namespace="x", name="pending"),
            Host(node="n1", addresses=("192.0.2.1", "192.0.2.11")),
            ApiServer(addresses=("192.0.2.2",)),
        ]
    )


@pytest.mark.parametrize(
    ("name", "key", "kind"),
    [
        ("x/a", "x/a", Kind.WORKLOAD),
        ("10.9.0.1", "x/a", Kind.WORKLOAD),
        ("fd00:0::1", "x/a", Kind.WORKLOAD),
        ("default:net:e", "default:net:e", Kind.WORKLOAD),
        ("10.1.1.1", "default:net:e", Kind.WORKLOAD),
        ("host:n1", "host:n1", Kind.HOST),
        ("192.0.2.11", "host:n1", Kind.HOST),
        ("apiserver", "apiserver", Kind.API_SERVER),
        ("192.0.2.2", "apiserver", Kind.API_SERVER),
        ("203.0.113.1", "203.0.113.1", Kind.WORLD),
    ],
)
def test_ends(engine: Engine, name: str, key: str, kind: Kind) -> None:
    end = engine.directory.flow(name, name, protocol=6, port=1).source
    assert (end.key, end.kind) == (key, kind)


def test_an_address_is_that_of_the_other_ends_tenant(engine: Engine) -> None:
    assert engine.directory.flow("red:net:e", "10.1.1.1", protocol=1).target.key == "red:net:e"
    assert engine.directory.flow("10.1.1.1", "default:net:e", protocol=1).source.key == "default:net:e"
    assert engine.directory.flow("10.1.1.1", "10.1.1.1", protocol=1, tenant="red").source.key == "red:net:e"
    assert engine.directory.flow("10.1.1.1", "10.1.1.1", protocol=1, tenant="none").source.kind is Kind.WORLD


def test_a_host_speaks_from_the_address_that_was_asked_for(engine: Engine) -> None:
    assert [str(each) for each in engine.directory.flow("192.0.2.11", "x/a", protocol=1).source.addresses] == [
        "192.0.2.11"
    ]


@pytest.mark.parametrize("name", ["x/nobody", "host:n9", "10.1.1", "fe80::1%eth0", "", "a" * 5000])
def test_who_is_not_known_is_not_found(engine: Engine, name: str) -> None:
    with pytest.raises(NotFound):
        engine.directory.flow(name, "x/a", protocol=6, port=1)


def test_the_version_is_one_that_both_ends_have(engine: Engine) -> None:
    assert engine.directory.flow("x/a", "x/a", protocol=6, port=1).version == 4
    assert engine.directory.flow("x/a", "x/a", protocol=6, port=1, version=6).version == 6
    assert engine.directory.flow("x/a", "x/six", protocol=6, port=1).version == 6
    assert engine.directory.flow("x/pending", "x/six", protocol=6, port=1).version == 6
    assert engine.directory.flow("x/pending", "x/pending", protocol=6, port=1).version == 4
    for source, version in (("default:net:e", None), ("x/a", 4)):
        with pytest.raises(Invalid):
            engine.directory.flow(source, "x/six", protocol=6, port=1, version=version)


def test_icmp_is_that_of_the_version(engine: Engine) -> None:
    assert engine.directory.flow("x/a", "x/a", protocol=1, version=6).protocol == 58
    assert engine.directory.flow("x/a", "x/a", protocol=58, version=4).protocol == 1


def test_an_address_given_anew_belongs_to_its_new_holder(engine: Engine) -> None:
    engine.remove_pod("x", "a")
    assert engine.directory.flow("10.9.0.1", "10.9.0.1", protocol=1).source.kind is Kind.WORLD
    engine.put(Pod(namespace="x", name="b", ips=("10.9.0.1",)))
    assert engine.directory.flow("10.9.0.1", "10.9.0.1", protocol=1).source.key == "x/b"
    engine.remove_host("n1")
    engine.remove_api_server()
    for address in ("192.0.2.1", "192.0.2.2"):
        assert engine.directory.flow(address, "x/b", protocol=1).source.kind is Kind.WORLD
