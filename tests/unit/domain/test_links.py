"""Links are computed from the references that objects hold, so they cannot go stale (W8; contiv 2.1, 2.2)."""

from __future__ import annotations

from typing import Any

from tests.support.fake_cluster import FakeCluster, group, network, policy, profile, rule, service

from weft.domain import kinds
from weft.domain.kinds import Kind
from weft.domain.links import Links, links_of


def populated() -> FakeCluster:
    world = FakeCluster()
    for value in (network(), policy(), profile(), group(policies=("p",), net_profile="gold"), group("db"), service()):
        world.put(value)
    world.put(rule("1", from_endpoint_group="db"))
    world.put(rule("2", direction="out", to_endpoint_group="db"))
    return world


def names(world: FakeCluster, kind: Kind[Any], key: str) -> dict[str, list[str]]:
    return {name: sorted(links) for name, links in Links(world.cluster).sets_of(kind, key).items()}


def test_a_tenant_shows_all_that_is_in_it() -> None:
    assert names(populated(), kinds.TENANT, "default") == {
        "Networks": ["default:blue"],
        "EndpointGroups": ["default:db", "default:web"],
        "Policies": ["default:p"],
        "NetProfiles": ["default:gold"],
        "Servicelbs": ["default:s"],
    }


def test_sets_of_each_kind() -> None:
    world = populated()
    links = Links(world.cluster)
    found = {
        (kind.name, key): {name: sorted(members) for name, members in links.sets_of(kind, key).items()}
        for kind, key in (
            (kinds.NETWORK, "default:blue"),
            (kinds.GROUP, "default:web"),
            (kinds.GROUP, "default:db"),
            (kinds.POLICY, "default:p"),
            (kinds.PROFILE, "default:gold"),
            (kinds.RULE, "default:p:1"),
            (kinds.SERVICE, "default:s"),
        )
    }
    assert found == {
        ("network", "default:blue"): {"EndpointGroups": ["default:db", "default:web"], "Servicelbs": ["default:s"]},
        ("endpointGroup", "default:web"): {"Policies": ["default:p"]},
        ("endpointGroup", "default:db"): {"MatchRules": ["default:p:1", "default:p:2"]},
        ("policy", "default:p"): {"EndpointGroups": ["default:web"], "Rules": ["default:p:1", "default:p:2"]},
        ("netprofile", "default:gold"): {"EndpointGroups": ["default:web"]},
        ("rule", "default:p:1"): {"Policies": ["default:p"]},
        ("serviceLB", "default:s"): {},
    }


def test_links_say_what_an_object_belongs_to() -> None:
    assert links_of(network()) == {"Tenant": {"type": "tenant", "key": "default"}}
    assert links_of(group(net_profile="gold")) == {
        "Tenant": {"type": "tenant", "key": "default"},
        "Network": {"type": "network", "key": "default:blue"},
        "NetProfile": {"type": "netprofile", "key": "default:gold"},
    }
    assert links_of(rule(from_endpoint_group="db"))["MatchEndpointGroup"]["key"] == "default:db"
    assert links_of(rule(direction="out", to_endpoint_group="db"))["MatchEndpointGroup"]["key"] == "default:db"
    assert "MatchEndpointGroup" not in links_of(rule())


def test_what_goes_takes_its_links_along() -> None:
    """W8: the original left links behind on the delete of a netprofile, a group and a network."""
    world = populated()
    world.put(group())
    for value in (profile(), policy()):
        world.delete(value)
    assert names(world, kinds.GROUP, "default:web") == {}
    world.delete(group())
    world.delete(group("db"))
    world.delete(service())
    assert names(world, kinds.NETWORK, "default:blue") == {}
    world.delete(network())
    assert names(world, kinds.TENANT, "default") == {}
