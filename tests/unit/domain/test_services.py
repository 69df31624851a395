"""Who provides a service: containment, whichever of the two came first (O20, W15, W22)."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from tests.support.fake_cluster import FakeCluster, endpoint, network, service

from weft.domain import kinds, model
from weft.domain.ids import TenantName
from weft.domain.lifecycle.changes import endpoints
from weft.domain.services import providers, services_of

LABELS = st.dictionaries(st.sampled_from("abc"), st.sampled_from("xy"), max_size=3)


def start(world: FakeCluster, name: str, labels: dict[str, str]) -> None:
    made = world.attach(name)
    changed, plan = endpoints.plan_update(world.reading(), made.key, labels=labels, container_id="", container_name="")
    assert changed.labels == labels
    world.carry_out(plan)


@given(LABELS.filter(bool), st.lists(LABELS, max_size=6), st.booleans())
def test_a_provider_has_every_selector(
    selectors: dict[str, str], labelled: list[dict[str, str]], service_first: bool
) -> None:
    world = FakeCluster()
    world.put(network())
    wanted = service(selectors=tuple(f"{name}={value}" for name, value in selectors.items()), ip_address="10.1.1.200")
    if service_first:
        world.put(wanted)
    for number, labels in enumerate(labelled):
        start(world, f"e{number}", labels)
    if not service_first:
        world.put(wanted)
    found = {one.endpoint_id for one in providers(world.cluster, wanted)}
    assert found == {f"e{number}" for number, labels in enumerate(labelled) if selectors.items() <= labels.items()}
    for one in world.cluster.all(kinds.ENDPOINT):
        assert bool(list(services_of(world.cluster, one))) == (one.endpoint_id in found)


def test_other_tenants_do_not_provide() -> None:
    world = FakeCluster()
    world.put(network())
    other = TenantName("t1")
    world.put(model.Tenant(name=other))
    world.put(network(tenant=other))
    wanted = msgspec.structs.replace(endpoint("e1"), tenant=other, labels={"app": "web"})
    _, plan = endpoints.plan_create(world.reading(), wanted, busy=endpoints.Busy())
    world.carry_out(plan)
    assert list(providers(world.cluster, service())) == []
    assert len(list(providers(world.cluster, service(tenant=other)))) == 1


def test_what_is_gone_provides_no_more() -> None:
    """W15."""
    world = FakeCluster()
    world.put(network())
    world.put(service())
    start(world, "e1", {"app": "web"})
    assert len(list(providers(world.cluster, service()))) == 1
    world.detach("e1")
    assert list(providers(world.cluster, service())) == []
