"""DNS in pods (contiv 7.14; B4, R4, R10, W40), queried from the name servers of the ADD result, IPv4 and IPv6."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.modes import BRIDGE_IN_SOAK, ON_OVS_TOO, OVS_MODES_IN_SOAK
from tests.support.resolver import Resolver

from weft.kernel.netns import Namespace
from weft.lab.hosts import Host, Pod
from weft.lab.netlab import NetLab
from weft.lab.servers.processes import DEADLINE
from weft.lab.waiting import eventually, soon, until

pytestmark = BRIDGE_IN_SOAK
NET = {"subnet": "10.1.0.0/16", "gateway": "10.1.0.1", "ipv6Subnet": "fd00:1::/64", "ipv6Gateway": "fd00:1::1"}
OUTSIDE = "www.example.org"


@pytest.fixture
async def resolver(lab: NetLab) -> AsyncIterator[Resolver]:
    """An upstream resolver on the underlay, which every host reaches."""
    loop = asyncio.get_running_loop()
    transport, resolver = await loop.create_datagram_endpoint(Resolver, local_addr=("192.0.2.254", 53))
    yield resolver
    transport.close()


@pytest.fixture
async def host(lab: NetLab) -> Host:
    await lab.network("net", **NET)
    host = await lab.host("one")
    host.resolv_conf.write_text("nameserver 192.0.2.254\n")
    return host


async def assert_resolves(pod: Pod, *question: str, answer: list[str], family: int = 4) -> None:
    """Wait until a query has the expected answer: netdns receives zones asynchronously."""

    async def query() -> list[str] | None:
        try:
            return await pod.dig(*question, family=family)
        except AssertionError:
            return None

    await eventually(query, lambda found: found == sorted(answer))


async def inspect(host: Host) -> tuple[int, Any]:
    """Status and body of `GET /inspect/nameserver`."""

    def request() -> tuple[int, Any]:
        try:
            with urllib.request.urlopen("http://127.0.0.1:9090/inspect/nameserver", timeout=DEADLINE) as reply:
                return reply.status, json.load(reply)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)

    with Namespace.open(host.netns) as machine:
        return await asyncio.to_thread(machine.run, request)


def count_sockets(pid: int) -> int:
    """The number of open sockets of a process."""
    links = (str(each.readlink()) for each in Path(f"/proc/{pid}/fd").iterdir())
    return sum(link.startswith("socket:") for link in links)


@ON_OVS_TOO
async def test_containers_and_groups_resolve_and_again_after_they_are_recreated_b4_r4(lab: NetLab, host: Host) -> None:
    """B4: every pod resolves and reaches both groups on any host; R4: forward and reverse, both families."""
    two = await lab.host("two")
    for _ in range(2):
        for group in ("svc1", "svc2"):
            await lab.group(group, network="net")
        pods = [await host.pod("web1", group="svc1"), await two.pod("web2", group="svc2")]
        for pod in pods:
            for family, kind in ((4, "A"), (6, "AAAA")):
                for group, other in zip(("svc1", "svc2"), pods, strict=True):
                    address = str(other.address(family))
                    await assert_resolves(pod, group, kind, answer=[address], family=family)
                    await assert_resolves(pod, other.name.upper(), kind, answer=[address], family=family)
                    await assert_resolves(pod, "-x", address, answer=[f"{other.name}."], family=family)
                    assert pod is other or await pod.eventually_reaches(other, family=family)
        await asyncio.gather(*(pod.remove() for pod in pods))
        for group in ("svc1", "svc2"):
            (await lab.rest.delete("endpointGroups", f"default:{group}")).accepted()


@OVS_MODES_IN_SOAK
async def test_a_service_resolves_forward_and_reverse_until_it_is_deleted_r4(lab: NetLab, host: Host) -> None:
    pod = await host.pod("web", network="net")
    shop = {"tenantName": "default", "serviceName": "shop.example", "networkName": "net"}
    (await lab.rest.put("serviceLBs", **shop, selectors=["app=web"], ports=["80:8080:TCP"])).accepted()
    oper = await lab.rest.oper("serviceLBs", "default:shop.example")
    for family, kind, member in ((4, "A", "serviceVip"), (6, "AAAA", "ipv6ServiceVip")):
        await assert_resolves(pod, "Shop.example", kind, answer=[oper[member]], family=family)
        await assert_resolves(pod, "-x", oper[member], answer=["shop.example."], family=family)
    (await lab.rest.delete("serviceLBs", "default:shop.example")).accepted()
    for family, kind, member in ((4, "A", "serviceVip"), (6, "AAAA", "ipv6ServiceVip")):
        await assert_resolves(pod, "shop.example", kind, answer=[], family=family)
        await assert_resolves(pod, "-x", oper[member], answer=[], family=family)


@OVS_MODES_IN_SOAK
async def test_a_large_group_resolves_to_ten_random_members_r4(lab: NetLab, host: Host) -> None:
    await lab.group("svc", network="net")
    pods = await asyncio.gather(*(host.pod(f"p{number}", group="svc") for number in range(13)))
    client, members = pods[0], {str(pod.address()) for pod in pods}
    seen: set[str] = set()

    async def all_seen() -> set[str]:
        answer = await client.dig("svc")
        assert len(answer) <= 10
        seen.update(answer)
        return seen

    await eventually(all_seen, lambda found: found == members)
    assert len(await client.dig("svc")) == len(await client.dig("svc", "AAAA", family=6)) == 10


@OVS_MODES_IN_SOAK
async def test_external_names_are_forwarded_and_internal_ones_never_r10(host: Host, resolver: Resolver) -> None:
    pod = await host.pod("web", network="net")
    assert pod.result.dns.nameservers == (NET["gateway"], NET["ipv6Gateway"])
    for family in (4, 6):
        await assert_resolves(pod, OUTSIDE, answer=["192.0.2.99"], family=family)
        assert "status: NXDOMAIN" in await pod.dig_in_full("absent", family=family)
        assert await pod.dig("-x", "10.1.77.77", family=family) == []
    assert await pod.dig("web", "TXT") == await pod.dig("x.svc.cluster.local") == []
    assert set(resolver.queries) == {f"{OUTSIDE}."}
    status, shown = await inspect(host)
    assert (status, shown["serving"]) == (200, ["default"])
    assert shown["dnsRecords"]["default"]["commonNames"] == {"web": [str(pod.address()), str(pod.address(6))]}
    assert shown["stats"]["forwarded"] >= 2


@OVS_MODES_IN_SOAK
async def test_pods_with_denied_egress_get_refused_for_external_names_cve_2024_29018(
    lab: NetLab, host: Host, resolver: Resolver
) -> None:
    """They still resolve names of their tenant, and a change of the rules applies at once."""
    policy = {"tenantName": "default", "policyName": "closed"}
    (await lab.rest.put("policys", **policy)).accepted()
    deny = {"ruleId": "1", "direction": "out", "action": "deny"}
    (await lab.rest.put("rules", **policy, **deny)).accepted()
    await lab.group("closed", network="net", policies=["closed"])
    await lab.group("open", network="net")
    closed, free = await host.pod("in", group="closed"), await host.pod("out", group="open")
    await assert_resolves(closed, "out", answer=[str(free.address())])
    await assert_resolves(free, OUTSIDE, answer=["192.0.2.99"])
    for family in (4, 6):
        for transport in ("+notcp", "+tcp"):
            output = await closed.dig_in_full(transport, "secret.example.org", family=family)
            assert "status: REFUSED" in output
    assert set(resolver.queries) == {f"{OUTSIDE}."}
    assert await closed.never_reaches(free)
    (await lab.rest.delete("rules", "default:closed:1")).accepted()
    await assert_resolves(closed, OUTSIDE, answer=["192.0.2.99"])
    (await lab.rest.put("rules", **policy, **deny)).accepted()
    await eventually(lambda: closed.dig_in_full(OUTSIDE), lambda output: "status: REFUSED" in output)


@OVS_MODES_IN_SOAK
async def test_dns_survives_kills_of_the_agent_and_of_netdns_w40(host: Host, resolver: Resolver) -> None:
    a, b = await host.pod("p1", network="net"), await host.pod("p2", network="net")
    await assert_resolves(a, "p2", answer=[str(b.address())])
    host.kill()
    assert await a.dig("p2") == [str(b.address())]
    assert await a.dig(OUTSIDE) == ["192.0.2.99"]
    host.kill_netdns()
    host.start_netdns()
    await until(lambda: (host.home / "netdns.log").read_text().count("netdns started") == 2)
    assert await a.dig("p2", "AAAA", family=6) == [str(b.address(6))]
    restarting = asyncio.create_task(host.start())
    while not restarting.done():
        assert await a.dig("p2") == [str(b.address())], "a restarting agent removes no record"
    await restarting
    c = await host.pod("p3", network="net")
    await assert_resolves(a, "p3", answer=[str(c.address())])
    await assert_resolves(c, "p1", answer=[str(a.address())])
    await b.remove()
    await assert_resolves(a, "p2", answer=[])


@OVS_MODES_IN_SOAK
async def test_tenants_with_the_same_names_and_addresses_have_separate_zones(lab: NetLab, host: Host) -> None:
    for tenant in ("blue", "red"):
        await lab.tenant(tenant)
        await lab.network("net", tenant=tenant, **NET)
    blue, red = [await host.pod(f"web-{tenant}", tenant=tenant, network="net") for tenant in ("blue", "red")]
    assert blue.address() == red.address()
    await assert_resolves(blue, "web-blue", answer=[str(blue.address())])
    await assert_resolves(red, "web-red", answer=[str(red.address())])
    assert await blue.dig("web-red") == await red.dig("web-blue") == []
    assert await blue.dig("-x", str(blue.address())) == ["web-blue."]
    assert await red.dig("-x", str(red.address())) == ["web-red."]


@ON_OVS_TOO
async def test_sockets_of_a_tenant_are_closed_after_its_last_del(host: Host) -> None:
    """An open socket would keep the tenant netns alive, with devices that the next one needs."""
    await until(lambda: "netdns started" in (host.home / "netdns.log").read_text())
    before = count_sockets(host.netdns.pid)
    for _ in range(3):
        pod = await host.pod("web", network="net")
        await assert_resolves(pod, "web", answer=[str(pod.address())])
        assert count_sockets(host.netdns.pid) > before
        await pod.remove()
        await until(lambda: not host.tenants.names())
        await until(lambda: count_sockets(host.netdns.pid) <= before + 1)  # the agent's connection
    assert (await inspect(host))[1]["serving"] == []


@OVS_MODES_IN_SOAK
async def test_add_and_del_work_while_netdns_is_stopped_or_dead(host: Host) -> None:
    pod = await host.pod("p1", network="net")
    await assert_resolves(pod, "p1", answer=[str(pod.address())])
    os.kill(host.netdns.pid, signal.SIGSTOP)
    for _ in range(2):
        await soon(pod.remove())
        pod = await soon(host.pod("p1", network="net"))
    host.kill_netdns()
    await soon(pod.remove())
    pod = await soon(host.pod("p1", network="net"))
    status, body = await inspect(host)
    assert (status, body["code"]) == (503, "unavailable")
    host.start_netdns()
    await eventually(lambda: inspect(host), lambda output: output[0] == 200 and output[1]["serving"] == ["default"])
    await assert_resolves(pod, "p1", answer=[str(pod.address())])


async def test_without_dns_the_result_has_no_name_servers(lab: NetLab) -> None:
    host = await lab.host("one", "--dns-socket", "none")
    pod = await host.pod("p1")
    assert pod.result.dns.nameservers == ()
    assert (await inspect(host))[0] == 501
