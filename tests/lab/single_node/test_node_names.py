"""Names as pods see them (contiv 7.14; B4, R4, R10, W40): asked of the name servers that ADD told, v4 and v6."""

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
    """On the underlay, where every host reaches it."""
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


async def comes_to(pod: Pod, *question: str, answer: list[str], family: int = 4) -> None:
    """What a pod is told, which may be a moment after the change, and after netdns has come to its tenant's space."""

    async def ask() -> list[str] | None:
        try:
            return await pod.dig(*question, family=family)
        except AssertionError:
            return None

    await eventually(ask, lambda found: found == sorted(answer))


async def inspect(host: Host) -> tuple[int, Any]:
    """Status and body of `GET /inspect/nameserver`."""

    def request() -> tuple[int, Any]:
        try:
            with urllib.request.urlopen("http://127.0.0.1:9090/inspect/nameserver", timeout=DEADLINE) as reply:
                return reply.status, json.load(reply)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)

    with Namespace.open(host.machine) as machine:
        return await asyncio.to_thread(machine.run, request)


def sockets_of(pid: int) -> int:
    """How many sockets a process has open."""
    links = (str(each.readlink()) for each in Path(f"/proc/{pid}/fd").iterdir())
    return sum(link.startswith("socket:") for link in links)


@ON_OVS_TOO
async def test_containers_and_groups_resolve_everywhere_and_again_when_made_anew_b4_r4(lab: NetLab, host: Host) -> None:
    """B4: every pod resolves and reaches both groups, on whichever host; R4: names, addresses, both families."""
    two = await lab.host("two")
    for _ in range(2):
        for group in ("svc1", "svc2"):
            await lab.group(group, network="net")
        pods = [await host.pod("web1", group="svc1"), await two.pod("web2", group="svc2")]
        for pod in pods:
            for family, kind in ((4, "A"), (6, "AAAA")):
                for group, other in zip(("svc1", "svc2"), pods, strict=True):
                    address = str(other.address(family))
                    await comes_to(pod, group, kind, answer=[address], family=family)
                    await comes_to(pod, other.name.upper(), kind, answer=[address], family=family)
                    await comes_to(pod, "-x", address, answer=[f"{other.name}."], family=family)
                    assert pod is other or await pod.reaches(other, family=family)
        await asyncio.gather(*(pod.remove() for pod in pods))
        for group in ("svc1", "svc2"):
            (await lab.rest.delete("endpointGroups", f"default:{group}")).accepted()


@OVS_MODES_IN_SOAK
async def test_a_service_resolves_forth_and_back_until_it_goes_r4(lab: NetLab, host: Host) -> None:
    pod = await host.pod("web", network="net")
    shop = {"tenantName": "default", "serviceName": "shop.example", "networkName": "net"}
    (await lab.rest.put("serviceLBs", **shop, selectors=["app=web"], ports=["80:8080:TCP"])).accepted()
    oper = await lab.rest.oper("serviceLBs", "default:shop.example")
    for family, kind, member in ((4, "A", "serviceVip"), (6, "AAAA", "ipv6ServiceVip")):
        await comes_to(pod, "Shop.example", kind, answer=[oper[member]], family=family)
        await comes_to(pod, "-x", oper[member], answer=["shop.example."], family=family)
    (await lab.rest.delete("serviceLBs", "default:shop.example")).accepted()
    for family, kind, member in ((4, "A", "serviceVip"), (6, "AAAA", "ipv6ServiceVip")):
        await comes_to(pod, "shop.example", kind, answer=[], family=family)
        await comes_to(pod, "-x", oper[member], answer=[], family=family)


@OVS_MODES_IN_SOAK
async def test_a_large_group_answers_with_ten_of_its_members_chosen_anew_r4(lab: NetLab, host: Host) -> None:
    await lab.group("svc", network="net")
    pods = await asyncio.gather(*(host.pod(f"p{number}", group="svc") for number in range(13)))
    asking, members = pods[0], {str(pod.address()) for pod in pods}
    seen: set[str] = set()

    async def all_seen() -> set[str]:
        answer = await asking.dig("svc")
        assert len(answer) <= 10
        seen.update(answer)
        return seen

    await eventually(all_seen, lambda found: found == members)
    assert len(await asking.dig("svc")) == len(await asking.dig("svc", "AAAA", family=6)) == 10


@OVS_MODES_IN_SOAK
async def test_other_names_are_asked_outside_and_ours_never_r10(host: Host, resolver: Resolver) -> None:
    pod = await host.pod("web", network="net")
    assert pod.result.dns.nameservers == (NET["gateway"], NET["ipv6Gateway"])
    for family in (4, 6):
        await comes_to(pod, OUTSIDE, answer=["192.0.2.99"], family=family)
        assert "status: NXDOMAIN" in await pod.dig_in_full("nobody", family=family)
        assert await pod.dig("-x", "10.1.77.77", family=family) == []
    assert await pod.dig("web", "TXT") == await pod.dig("x.svc.cluster.local") == []
    assert set(resolver.asked) == {f"{OUTSIDE}."}
    status, shown = await inspect(host)
    assert (status, shown["serving"]) == (200, ["default"])
    assert shown["dnsRecords"]["default"]["commonNames"] == {"web": [str(pod.address()), str(pod.address(6))]}
    assert shown["stats"]["forwarded"] >= 2


@OVS_MODES_IN_SOAK
async def test_who_may_not_go_out_asks_nothing_outside_cve_2024_29018(
    lab: NetLab, host: Host, resolver: Resolver
) -> None:
    """Names of its tenant are told it all the same, and a change of its rules counts at once."""
    policy = {"tenantName": "default", "policyName": "closed"}
    (await lab.rest.put("policys", **policy)).accepted()
    deny = {"ruleId": "1", "direction": "out", "action": "deny"}
    (await lab.rest.put("rules", **policy, **deny)).accepted()
    await lab.group("closed", network="net", policies=["closed"])
    await lab.group("open", network="net")
    closed, free = await host.pod("in", group="closed"), await host.pod("out", group="open")
    await comes_to(closed, "out", answer=[str(free.address())])
    await comes_to(free, OUTSIDE, answer=["192.0.2.99"])
    for family in (4, 6):
        for transport in ("+notcp", "+tcp"):
            told = await closed.dig_in_full(transport, "secret.example.org", family=family)
            assert "status: REFUSED" in told
    assert set(resolver.asked) == {f"{OUTSIDE}."}
    assert await closed.never_reaches(free)
    (await lab.rest.delete("rules", "default:closed:1")).accepted()
    await comes_to(closed, OUTSIDE, answer=["192.0.2.99"])
    (await lab.rest.put("rules", **policy, **deny)).accepted()
    await eventually(lambda: closed.dig_in_full(OUTSIDE), lambda told: "status: REFUSED" in told)


@OVS_MODES_IN_SOAK
async def test_names_outlive_the_agent_and_netdns_itself_w40(host: Host, resolver: Resolver) -> None:
    a, b = await host.pod("p1", network="net"), await host.pod("p2", network="net")
    await comes_to(a, "p2", answer=[str(b.address())])
    host.kill()
    assert await a.dig("p2") == [str(b.address())]
    assert await a.dig(OUTSIDE) == ["192.0.2.99"]
    host.kill_names()
    host.launch_names()
    await until(lambda: (host.home / "netdns.log").read_text().count("netdns started") == 2)
    assert await a.dig("p2", "AAAA", family=6) == [str(b.address(6))]
    restarting = asyncio.create_task(host.start())
    while not restarting.done():
        assert await a.dig("p2") == [str(b.address())], "an agent that comes back takes nothing away"
    await restarting
    c = await host.pod("p3", network="net")
    await comes_to(a, "p3", answer=[str(c.address())])
    await comes_to(c, "p1", answer=[str(a.address())])
    await b.remove()
    await comes_to(a, "p2", answer=[])


@OVS_MODES_IN_SOAK
async def test_tenants_with_the_same_names_and_addresses_never_meet(lab: NetLab, host: Host) -> None:
    for tenant in ("blue", "red"):
        await lab.tenant(tenant)
        await lab.network("net", tenant=tenant, **NET)
    blue, red = [await host.pod(f"web-{tenant}", tenant=tenant, network="net") for tenant in ("blue", "red")]
    assert blue.address() == red.address()
    await comes_to(blue, "web-blue", answer=[str(blue.address())])
    await comes_to(red, "web-red", answer=[str(red.address())])
    assert await blue.dig("web-red") == await red.dig("web-blue") == []
    assert await blue.dig("-x", str(blue.address())) == ["web-blue."]
    assert await red.dig("-x", str(red.address())) == ["web-red."]


@ON_OVS_TOO
async def test_nothing_is_left_of_a_tenant_whose_last_pod_has_gone(host: Host) -> None:
    """A socket would keep its space, and the devices that its next one needs."""
    await until(lambda: "netdns started" in (host.home / "netdns.log").read_text())
    before = sockets_of(host.names.pid)
    for _ in range(3):
        pod = await host.pod("web", network="net")
        await comes_to(pod, "web", answer=[str(pod.address())])
        assert sockets_of(host.names.pid) > before
        await pod.remove()
        await until(lambda: not host.tenants.names())
        await until(lambda: sockets_of(host.names.pid) <= before + 1)  # the agent's own connection
    assert (await inspect(host))[1]["serving"] == []


@OVS_MODES_IN_SOAK
async def test_pods_come_and_go_while_netdns_is_stopped_or_gone(host: Host) -> None:
    pod = await host.pod("p1", network="net")
    await comes_to(pod, "p1", answer=[str(pod.address())])
    os.kill(host.names.pid, signal.SIGSTOP)
    for _ in range(2):
        await soon(pod.remove())
        pod = await soon(host.pod("p1", network="net"))
    host.kill_names()
    await soon(pod.remove())
    pod = await soon(host.pod("p1", network="net"))
    status, body = await inspect(host)
    assert (status, body["code"]) == (503, "unavailable")
    host.launch_names()
    await eventually(lambda: inspect(host), lambda told: told[0] == 200 and told[1]["serving"] == ["default"])
    await comes_to(pod, "p1", answer=[str(pod.address())])


async def test_without_names_the_runtime_keeps_its_own_resolvers(lab: NetLab) -> None:
    host = await lab.host("one", "--names-socket", "none")
    pod = await host.pod("p1")
    assert pod.result.dns.nameservers == ()
    assert (await inspect(host))[0] == 501
