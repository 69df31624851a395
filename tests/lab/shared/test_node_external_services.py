"""Services reached from outside the cluster, from hosts and from other tenants, with packets (contiv 7.11)."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from contextlib import ExitStack
from ipaddress import ip_address
from typing import Any

import pytest
from tests.support import inventory
from tests.support.external_hosts import (
    EXTERNAL,
    EXTERNAL_CLIENT,
    FAMILIES,
    NODE_PORT,
    VIPS,
    all_responses,
    host_address,
    host_netns_address,
    overlay_host_address,
    pod_addresses,
    responder_names,
    routed,
)
from tests.support.kube_feed import TARGET_PORT, KubeFeed, kube_feed
from tests.support.modes import TOWNS_ALL_IN_SOAK
from tests.support.responders import Response, answering, gets_no_reply, is_refused, query, query_with_socket
from tests.support.tenant_fixture import TenantFixture

from weft.lab.hosts import Host
from weft.lab.netlab import NetLab
from weft.lab.traffic import TCP, UDP, NetnsAddress, Transport

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.usefixtures("underlay"), TOWNS_ALL_IN_SOAK]

STORE = "etcd"


@pytest.mark.parametrize("transport", [TCP, UDP])
@pytest.mark.parametrize("family", FAMILIES)
async def test_node_ports_reach_all_pods_from_every_node(
    testbed: TenantFixture, feed: KubeFeed, external: dict[int, NetnsAddress], family: int, transport: Transport
) -> None:
    """externalTrafficPolicy Cluster: pods on the ingress node see the client, pods on other nodes see that node."""
    pods = await testbed.pods()
    await feed.put("web", *pods, node_port=NODE_PORT, transport=transport.name, clusterIPs=[VIPS[family]])
    async with answering(pod_addresses(pods, family), port=TARGET_PORT, transport=transport):
        for near, far in itertools.permutations(pods):
            ingress_address = host_address(near.host, family)
            found = await all_responses(external[family], ingress_address, NODE_PORT, transport=transport)
            assert found == {
                Response(near.name, EXTERNAL_CLIENT[family]),
                Response(far.name, overlay_host_address(near.host, family)),
            }


@pytest.mark.parametrize("family", FAMILIES)
async def test_external_ips_reach_all_pods(
    testbed: TenantFixture, feed: KubeFeed, external: dict[int, NetnsAddress], external_ranges: None, family: int
) -> None:
    """externalIPs and load balancer ingress IPs, from external clients, hosts and pods."""
    near, far = await testbed.pods()
    other = EXTERNAL[family] + "7"
    await feed.put("web", near, far, clusterIPs=[VIPS[family]], externalIPs=[EXTERNAL[family]], ingress=[other])
    async with answering(pod_addresses([near, far], family), port=TARGET_PORT):
        with ExitStack() as closing:
            clients = [
                external[family],
                host_netns_address(near.host, closing, family),
                near.place(family),
                far.place(family),
            ]
            for client, address in itertools.product(clients, (EXTERNAL[family], other)):
                assert responder_names(await all_responses(client, address)) == {near.name, far.name}
        assert await is_refused(external[family], EXTERNAL[family], 81), "only service ports are open"


@pytest.mark.parametrize("policy", ["Cluster", "Local"])
@pytest.mark.parametrize("family", FAMILIES)
async def test_an_external_ip_may_be_a_local_address_of_a_host(
    testbed: TenantFixture,
    feed: KubeFeed,
    external: dict[int, NetnsAddress],
    external_ranges: None,
    family: int,
    policy: str,
) -> None:
    """As with keepalived: the address is on an interface of the ingress host."""
    near, far = await testbed.pods()
    options: dict[str, Any] = {"clusterIPs": [VIPS[family]], "externalTrafficPolicy": policy}
    await feed.put("web", near, far, node_port=NODE_PORT, ingress=[EXTERNAL[family]], **options)
    await feed.put("more", far, externalIPs=[EXTERNAL[family] + "1"], clusterIPs=[VIPS[family] + "1"])
    addresses = [f"{EXTERNAL[family]}{end}/{32 if family == 4 else 128} dev lo" for end in ("", "1")]
    async with answering(pod_addresses([near, far], family), port=TARGET_PORT):
        for address in addresses:
            inventory.run(near.host.netns, f"ip addr add {address}")
        try:
            found = await all_responses(external[family], EXTERNAL[family])
            assert Response(near.name, EXTERNAL_CLIENT[family]) in found
            assert responder_names(found) == ({near.name} if policy == "Local" else {near.name, far.name})
            assert responder_names(await all_responses(external[family], EXTERNAL[family] + "1")) == {far.name}
        finally:
            for address in addresses:
                inventory.run(near.host.netns, f"ip addr del {address}")


@pytest.mark.parametrize("family", FAMILIES)
async def test_load_balancer_source_ranges(
    testbed: TenantFixture, feed: KubeFeed, external: dict[int, NetnsAddress], external_ranges: None, family: int
) -> None:
    """They restrict the load balancer IP, but not node ports and cluster IPs."""
    near, _ = await testbed.pods()
    other = "192.0.2.253/32" if family == 4 else "2001:db8:ffff::253/128"
    own = other.replace("253", "254")
    async with answering(pod_addresses([near], family), port=TARGET_PORT):
        for ranges, passes in (([other], False), ([other, own], True), ([other], False), ([], True)):
            limits: dict[str, Any] = {"clusterIPs": [VIPS[family]], "loadBalancerSourceRanges": ranges}
            await feed.put("web", near, node_port=NODE_PORT, ingress=[EXTERNAL[family]], **limits)
            if passes:
                assert responder_names({await query(external[family], EXTERNAL[family], 80)}) == {near.name}
            else:
                assert await gets_no_reply(external[family], EXTERNAL[family], 80)
            assert responder_names({await query(external[family], host_address(near.host, family), NODE_PORT)}) == {
                near.name
            }


def only(*allowed: object) -> dict[str, Any]:
    """The spec of a service that these addresses may call, and no other."""
    return {"loadBalancerSourceRanges": [f"{each}/{32 if '.' in str(each) else 128}" for each in allowed]}


@pytest.mark.parametrize("transport", [TCP, pytest.param(UDP, marks=pytest.mark.soak)])
@pytest.mark.parametrize("policy", ["Cluster", pytest.param("Local", marks=pytest.mark.soak)])
@pytest.mark.parametrize("family", FAMILIES)
async def test_M10_source_ranges_hold_at_a_host_that_has_the_address_itself(
    testbed: TenantFixture,
    feed: KubeFeed,
    external: dict[int, NetnsAddress],
    external_ranges: None,
    family: int,
    policy: str,
    transport: Transport,
) -> None:
    """The host translates before any other chain sees the address; it asks before that."""
    near, _ = await testbed.pods()
    options: dict[str, Any] = {"clusterIPs": [VIPS[family]], "externalTrafficPolicy": policy}
    address = f"{EXTERNAL[family]}/{32 if family == 4 else 128} dev lo"
    other, own = str(ip_address(EXTERNAL_CLIENT[family]) - 1), EXTERNAL_CLIENT[family]
    inventory.run(near.host.netns, f"ip addr add {address}")
    try:
        async with answering(pod_addresses([near], family), port=TARGET_PORT, transport=transport):
            for allowed, passes in (((other,), False), ((other, own), True), ((other,), False)):
                await feed.put(
                    "web",
                    near,
                    node_port=NODE_PORT,
                    ingress=[EXTERNAL[family]],
                    transport=transport.name,
                    **options,
                    **only(*allowed),
                )
                target: tuple[Any, Any, int] = external[family], EXTERNAL[family], 80
                if passes:
                    assert responder_names({await query(*target, transport=transport)}) == {near.name}
                else:
                    assert await gets_no_reply(*target, transport=transport)
                with ExitStack() as closing:
                    host = host_netns_address(near.host, closing, family)
                    assert await gets_no_reply(host, EXTERNAL[family], 80, transport=transport), "the host is asked too"
    finally:
        inventory.run(near.host.netns, f"ip addr del {address}")


@pytest.mark.parametrize("family", FAMILIES)
async def test_M10_services_that_share_an_address_have_their_own_source_ranges(
    testbed: TenantFixture, feed: KubeFeed, external: dict[int, NetnsAddress], external_ranges: None, family: int
) -> None:
    """By address, protocol and port. A third one has no ranges, and is open."""
    near, _ = await testbed.pods()
    other, own = str(ip_address(EXTERNAL_CLIENT[family]) - 1), EXTERNAL_CLIENT[family]
    limits = {80: only(own), 81: only(other), 82: {}}
    for port, limit in limits.items():
        ports = [{"name": "web", "protocol": "TCP", "port": port}]
        vip = str(ip_address(VIPS[family]) + port)
        await feed.put(f"web-{port}", near, ingress=[EXTERNAL[family]], ports=ports, clusterIPs=[vip], **limit)
    async with answering(pod_addresses([near], family), port=TARGET_PORT):
        for port in (80, 82):
            assert responder_names({await query(external[family], EXTERNAL[family], port)}) == {near.name}
        assert await gets_no_reply(external[family], EXTERNAL[family], 81)


@pytest.mark.parametrize("policy", ["Cluster", pytest.param("Local", marks=pytest.mark.soak)])
@pytest.mark.parametrize("family", FAMILIES)
async def test_M10_pods_are_asked_for_their_address(
    testbed: TenantFixture, feed: KubeFeed, external_ranges: None, family: int, policy: str
) -> None:
    """As in "should only allow access from service loadbalancer source ranges" of Kubernetes: the callers are pods."""
    near, far = await testbed.pods()
    friend, other = await testbed.pod(near.host), await testbed.pod(near.host)
    options: dict[str, Any] = {"clusterIPs": [VIPS[family]], "externalTrafficPolicy": policy}
    allowed = only(friend.address(family), far.address(family))
    await feed.put("web", near, ingress=[EXTERNAL[family]], **options, **allowed)
    async with answering(pod_addresses([near], family), port=TARGET_PORT):
        for pod in (friend, far):
            assert responder_names({await query(pod.place(family), EXTERNAL[family], 80)}) == {near.name}
        for pod in (other, near):
            assert await gets_no_reply(pod.place(family), EXTERNAL[family], 80)
            assert responder_names({await query(pod.place(family), VIPS[family], 80)}) == {near.name}, "the cluster IP"
        await feed.put("web", near, ingress=[EXTERNAL[family]], **options)
        assert responder_names({await query(other.place(family), EXTERNAL[family], 80)}) == {near.name}


@pytest.mark.parametrize("family", FAMILIES)
async def test_external_traffic_policy_local_preserves_the_client_address(
    testbed: TenantFixture, feed: KubeFeed, external: dict[int, NetnsAddress], external_ranges: None, family: int
) -> None:
    """Traffic stays on the ingress node. For pods and hosts an external IP behaves like the cluster IP."""
    near, far = await testbed.pods()
    options: dict[str, Any] = {
        "clusterIPs": [VIPS[family]],
        "externalIPs": [EXTERNAL[family]],
        "externalTrafficPolicy": "Local",
    }
    await feed.put("web", near, far, node_port=NODE_PORT, **options)
    async with answering(pod_addresses([near, far], family), port=TARGET_PORT):
        for pod in (near, far):
            found = await all_responses(external[family], host_address(pod.host, family), NODE_PORT)
            assert found == {Response(pod.name, EXTERNAL_CLIENT[family])}
        assert await all_responses(external[family], EXTERNAL[family]) == {Response(near.name, EXTERNAL_CLIENT[family])}
        assert responder_names(await all_responses(near.place(family), EXTERNAL[family])) == {near.name, far.name}
        await feed.put("web", far, node_port=NODE_PORT, **options)
        for address, port in ((EXTERNAL[family], 80), (host_address(near.host, family), NODE_PORT)):
            assert await is_refused(external[family], address, port), "only another node has backends"


@pytest.mark.parametrize("family", FAMILIES)
async def test_policy_is_evaluated_for_the_client_and_not_for_the_ingress_node(
    testbed: TenantFixture, feed: KubeFeed, external: dict[int, NetnsAddress], family: int
) -> None:
    """A pod that allows one address only is reached through a node port by that address, and by no other."""
    await testbed.policy("closed", "-d in -p 1 -j deny", f"-d in -p 2 -i {EXTERNAL_CLIENT[family]} -j allow")
    await testbed.group("closed", "closed")
    near, far = await testbed.pods("closed")
    unknown = await testbed.pod(near.host)
    await feed.put("web", near, node_port=NODE_PORT, clusterIPs=[VIPS[family]], externalTrafficPolicy="Local")
    async with answering(pod_addresses([near], family), port=TARGET_PORT):
        ingress_address = host_address(near.host, family)
        assert await all_responses(external[family], ingress_address, NODE_PORT) == {
            Response(near.name, EXTERNAL_CLIENT[family])
        }
        with ExitStack() as closing:
            for client in (host_netns_address(far.host, closing, family), far.place(family), unknown.place(family)):
                assert await gets_no_reply(client, ingress_address, NODE_PORT)


@pytest.mark.parametrize("family", FAMILIES)
async def test_internal_traffic_policy_local_stays_on_the_node(
    testbed: TenantFixture, feed: KubeFeed, family: int
) -> None:
    near, far = await testbed.pods()
    await feed.put("web", near, far, clusterIPs=[VIPS[family]], internalTrafficPolicy="Local")
    async with answering(pod_addresses([near, far], family), port=TARGET_PORT):
        for pod in (near, far):
            assert responder_names(await all_responses(pod.place(family), VIPS[family])) == {pod.name}


@pytest.mark.parametrize("family", FAMILIES)
async def test_hosts_reach_cluster_ips_and_node_ports(
    testbed: TenantFixture, feed: KubeFeed, external: dict[int, NetnsAddress], family: int
) -> None:
    """Also hosts without pods of the tenant. External clients never reach a cluster IP."""
    one, two = testbed.lab.hosts.values()
    pod = await testbed.pod(two)
    await feed.put("web", pod, node_port=NODE_PORT, clusterIPs=[VIPS[family]])
    async with answering(pod_addresses([pod], family), port=TARGET_PORT):
        with ExitStack() as closing:
            node_ports = [(host_address(host, family), NODE_PORT) for host in (one, two)]
            for host in (one, two):
                client = host_netns_address(host, closing, family)
                for address, port in ((VIPS[family], 80), *node_ports):
                    assert responder_names(await all_responses(client, address, port)) == {pod.name}, (
                        host.name,
                        address,
                    )
                loopback = NetnsAddress(client.namespace, ip_address("127.0.0.1" if family == 4 else "::1"))
                assert await is_refused(loopback, loopback.address, NODE_PORT)
        with routed(VIPS[family], host_address(two, family)):
            assert await gets_no_reply(external[family], VIPS[family], 80)


@pytest.mark.parametrize("family", FAMILIES)
async def test_a_service_without_backends_refuses_all_clients(
    testbed: TenantFixture, feed: KubeFeed, external: dict[int, NetnsAddress], external_ranges: None, family: int
) -> None:
    near, _ = await testbed.pods()
    await feed.put("web", node_port=NODE_PORT, clusterIPs=[VIPS[family]], externalIPs=[EXTERNAL[family]])
    assert await is_refused(near.place(family), VIPS[family], 80)
    assert await is_refused(external[family], EXTERNAL[family], 80)
    assert await is_refused(external[family], host_address(near.host, family), NODE_PORT)
    with ExitStack() as closing:
        assert await is_refused(host_netns_address(near.host, closing, family), VIPS[family], 80)


@pytest.mark.parametrize("family", FAMILIES)
async def test_session_affinity(
    testbed: TenantFixture, feed: KubeFeed, external: dict[int, NetnsAddress], family: int
) -> None:
    """sessionAffinity ClientIP applies to node ports too."""
    pods = [*await testbed.pods(), *await testbed.pods()]
    await feed.put("web", *pods, node_port=NODE_PORT, clusterIPs=[VIPS[family]], sessionAffinity="ClientIP")
    async with answering(pod_addresses(pods, family), port=TARGET_PORT):
        for client, address, port in (
            (pods[0].place(family), VIPS[family], 80),
            (external[family], host_address(pods[0].host, family), NODE_PORT),
        ):
            assert len(responder_names(await all_responses(client, address, port))) == 1


@pytest.mark.parametrize("family", FAMILIES)
async def test_a_pod_reaches_itself_through_its_service(
    testbed: TenantFixture, feed: KubeFeed, external_ranges: None, family: int
) -> None:
    """Hairpin: through all addresses of the service, and through node ports of its own and of another host."""
    near, far = await testbed.pods()
    await feed.put("web", near, node_port=NODE_PORT, clusterIPs=[VIPS[family]], externalIPs=[EXTERNAL[family]])
    async with answering(pod_addresses([near], family), port=TARGET_PORT):
        for client in (near, far):
            for address, port in (
                (VIPS[family], 80),
                (EXTERNAL[family], 80),
                (host_address(near.host, family), NODE_PORT),
                (host_address(far.host, family), NODE_PORT),
            ):
                assert responder_names({await query(client.place(family), address, port)}) == {near.name}, (
                    client.name,
                    address,
                )


@pytest.mark.parametrize("family", FAMILIES)
async def test_a_shared_service_is_reachable_from_every_tenant(
    testbed: TenantFixture, feed: KubeFeed, make_tenant: Callable[[], TenantFixture], family: int
) -> None:
    """Although both have the same subnets. A service that is not shared is reachable from its own tenant only."""
    pods = await testbed.pods()
    neighbours = make_tenant()
    await neighbours.build()
    others = await neighbours.pods()
    await feed.put("dns", *pods, clusterIPs=[VIPS[family]], shared=True)
    async with answering(pod_addresses(pods, family), port=TARGET_PORT):
        for client in (*pods, *others):
            assert responder_names(await all_responses(client.place(family), VIPS[family])) == {
                pod.name for pod in pods
            }
        await feed.put("dns", *pods, clusterIPs=[VIPS[family]])
        for client in others:
            assert await gets_no_reply(client.place(family), VIPS[family], 80)


@pytest.mark.parametrize("family", FAMILIES)
async def test_a_host_can_be_a_backend(
    testbed: TenantFixture,
    feed: KubeFeed,
    external: dict[int, NetnsAddress],
    make_tenant: Callable[[], TenantFixture],
    family: int,
) -> None:
    """Like the API server: for pods of all tenants, for hosts and for node ports, local and remote."""
    near, far = await testbed.pods()
    neighbours = make_tenant()
    await neighbours.build()
    others = await neighbours.pods()
    address = host_address(near.host, family)
    await feed.put("kubernetes", addresses=[address], node_port=NODE_PORT, clusterIPs=[VIPS[family]], shared=True)
    with ExitStack() as closing:
        server = host_netns_address(near.host, closing, family)
        async with answering({"api": server}, port=TARGET_PORT):
            clients = [pod.place(family) for pod in (near, far, *others)]
            clients += [host_netns_address(pod.host, closing, family) for pod in (near, far)]
            for client in clients:
                assert responder_names({await query(client, VIPS[family], 80)}) == {"api"}
            for pod in (near, far):
                assert responder_names({await query(external[family], host_address(pod.host, family), NODE_PORT)}) == {
                    "api"
                }


@pytest.mark.parametrize("family", FAMILIES)
async def test_no_datagram_is_sent_to_a_removed_backend(
    testbed: TenantFixture, feed: KubeFeed, external: dict[int, NetnsAddress], family: int
) -> None:
    """A client with a fixed source port, like a resolver, moves to the next backend, also if there was none before."""
    near, far = await testbed.pods()
    options: dict[str, Any] = {"transport": "UDP", "node_port": NODE_PORT, "clusterIPs": [VIPS[family]]}
    loop = asyncio.get_running_loop()
    async with answering(pod_addresses([near, far], family), port=TARGET_PORT, transport=UDP):
        with external[family].open_client(UDP) as client, near.place(family).open_client(UDP) as inner:
            requests = ((client, host_address(near.host, family), NODE_PORT), (inner, VIPS[family], 80))
            for sender, address, port in requests:
                await loop.sock_sendto(sender, b"early", (address, port))
            for pod in (near, far, near):
                await feed.put("dns", pod, **options)
                for sender, address, port in requests:
                    answer = await query_with_socket(sender, address, port, transport=UDP)
                    assert answer.responder == pod.name


async def test_node_ports_work_while_the_agent_is_down_and_after_its_restart(
    testbed: TenantFixture, feed: KubeFeed, external: dict[int, NetnsAddress], external_ranges: None
) -> None:
    """And they are closed when the Service is deleted."""
    near, far = await testbed.pods()
    host = near.host
    await feed.put("web", near, far, node_port=NODE_PORT, clusterIPs=[VIPS[4]], externalIPs=[EXTERNAL[4]])
    async with answering(pod_addresses([near, far], 4), port=TARGET_PORT):
        host.kill()
        for _ in range(2):
            for address, port in ((host.address, NODE_PORT), (EXTERNAL[4], 80)):
                assert responder_names(await all_responses(external[4], address, port)) == {near.name, far.name}
            await host.start()
        await feed.remove("web")
        assert await is_refused(external[4], host.address, NODE_PORT)
        assert await gets_no_reply(external[4], EXTERNAL[4], 80)


async def test_nothing_is_left_of_a_tenant_with_services_only(
    lab: NetLab, make_tenant: Callable[[], TenantFixture]
) -> None:
    """A tenant without workloads is configured on every node with its first node port, and removed with its last."""
    testbed = make_tenant()
    await testbed.build()
    before = [host_datapath_state(host) for host in lab.hosts.values()]
    async with kube_feed(lab, testbed.tenant) as feed:
        await feed.put("web", node_port=NODE_PORT, clusterIPs=[VIPS[4]])
        assert all(testbed.tenant in host.tenants.names() for host in lab.hosts.values())
    for host, state in zip(lab.hosts.values(), before, strict=True):
        assert host_datapath_state(host) == state
        assert testbed.tenant not in host.tenants.names()


def host_datapath_state(host: Host) -> tuple[set[str], list[str], object]:
    """Devices, routes and map elements of the host's nft table."""
    routes = [
        str(route["dst"])
        for family in ("-4", "-6")
        for route in inventory.run_json(host.netns, "ip", "-j", family, "route")
    ]
    ruleset = inventory.run_json(host.netns, "nft", "-j", "list", "ruleset")["nftables"]
    elements = {each["map"]["name"]: each["map"].get("elem") for each in ruleset if "map" in each}
    return inventory.devices(host.netns), sorted(routes), elements
