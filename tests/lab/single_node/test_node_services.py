"""Contiv's services on two hosts: the VIP follows changes of its providers (contiv 10.7)."""

from __future__ import annotations

import asyncio
import json
import subprocess
from functools import partial
from ipaddress import IPv4Address, IPv6Address, ip_address
from itertools import product
from typing import Any

from tests.support.modes import ALL_IN_SOAK, BOTH_MODES, BRIDGE_IN_SOAK, ON_ALL, ON_OVS_TOO, OVS_MODES_IN_SOAK

from weft.kernel.netns import Namespace
from weft.lab.hosts import Host, Pod
from weft.lab.http_services import NO_ANSWER, REFUSED, query_backend, serving_names
from weft.lab.netlab import NetLab, open_lab
from weft.lab.servers.masters import MasterProcess, client
from weft.lab.traffic import TCP, UDP, IPAddress, NetnsAddress, Transport
from weft.lab.waiting import DEADLINE, eventually

LABELS = {"app": "web", "tier": "front", "zone": "a", "colour": "green"}
SERVICE: dict[str, object] = {
    "tenantName": "default",
    "serviceName": "shop",
    "networkName": "net",
    "selectors": [f"{key}={value}" for key, value in LABELS.items()],
    "ports": ["80:8080:TCP", "643:7070:UDP"],
}
VIPS: dict[int, IPAddress] = {4: IPv4Address("10.1.0.200"), 6: IPv6Address("fd00:1::200")}
ASKED_FOR = {"ipAddress": str(VIPS[4]), "ipv6Address": str(VIPS[6])}
NET = {"subnet": "10.1.0.0/24", "gateway": "10.1.0.254", "ipv6Subnet": "fd00:1::/64", "ipv6Gateway": "fd00:1::1"}
TRANSPORTS = ((TCP, 80, 8080), (UDP, 643, 7070))


async def start(lab: NetLab) -> tuple[Host, Host]:
    await lab.network("net", **NET)
    one, two = await asyncio.gather(lab.host("one"), lab.host("two"))
    return one, two


async def label(lab: NetLab, pod: Pod, **labels: str) -> None:
    """Report the start of the pod's container with labels."""
    call = {"Event": "start", "Tenant": "default", "EndpointID": pod.name, "Labels": labels}
    (await lab.rest.post("/plugin/updateEndpoint", call)).accepted()


async def put_service(lab: NetLab, **members: object) -> None:
    """Create or update the service and check its requested VIPs."""
    (await lab.rest.put("serviceLBs", **(SERVICE | ASKED_FOR | members))).accepted()
    assert await addresses(lab) == VIPS


async def addresses(lab: NetLab) -> dict[int, IPAddress]:
    """The VIPs of the service, by family."""
    oper = await lab.rest.oper("serviceLBs", "default:shop")
    return {4: ip_address(oper["serviceVip"]), 6: ip_address(oper["ipv6ServiceVip"])}


async def providers_seen(client: NetnsAddress, *, port: int, transport: Transport = TCP, times: int = 24) -> set[str]:
    """The names of the providers that answer at the service's VIP of the client's family."""
    vip = VIPS[client.address.version]
    return {await query_backend(client, vip, port=port, transport=transport) for _ in range(times)}


async def assert_providers_seen(client: Pod, providers: list[Pod]) -> None:
    """Wait until exactly these providers answer, for both transports and families.

    W45: no client is pinned to its first provider.
    """
    wanted = {pod.name for pod in providers}
    for (transport, port, target_port), family in product(TRANSPORTS, VIPS):
        async with serving_names(providers, port=target_port, transport=transport, family=family):
            ask = partial(providers_seen, client.place(family), port=port, transport=transport)
            await eventually(ask, lambda names: names == wanted)


@ON_OVS_TOO
@BOTH_MODES
async def test_s1_s2_s3_providers_are_added_and_removed(lab: NetLab) -> None:
    """S1, S2, S3, W44: before and after the service, on both hosts; clients of any network reach all of them."""
    one, two = await start(lab)
    early, client = await one.pod("early", network="net"), await two.pod("client", network="net")
    await label(lab, early, **LABELS)
    await put_service(lab)
    await assert_providers_seen(client, [early])
    late = await two.pod("late", network="net")
    await label(lab, late, **LABELS, more="labels")
    await assert_providers_seen(client, [early, late])
    await lab.network("later", subnet="10.2.0.0/24", ipv6Subnet="fd00:2::/64")
    consumer = await one.pod("consumer", network="later")
    await assert_providers_seen(consumer, [early, late])
    await early.remove()
    await assert_providers_seen(consumer, [late])
    early = await one.pod("early", network="net")
    await label(lab, early, **LABELS)
    for each in (client, consumer, early):
        await assert_providers_seen(each, [early, late])


@ALL_IN_SOAK
async def test_s8_labels_must_contain_the_selectors(lab: NetLab) -> None:
    """S8, W15, W21, W22: a superset of the selector matches, a subset does not, and labels can change; `tcp` is TCP."""
    one, _ = await start(lab)
    client, provider, other = await asyncio.gather(
        *(one.pod(name, network="net") for name in ("client", "provider", "other"))
    )
    await put_service(lab, ports=["80:8080:tcp", "643:7070:Udp"])
    await label(lab, provider, **LABELS, more="labels")
    await label(lab, other, **dict(list(LABELS.items())[:3]))
    await assert_providers_seen(client, [provider])
    await label(lab, other, **LABELS)
    await label(lab, provider)
    await assert_providers_seen(client, [other])
    await lab.rest.post("/plugin/updateEndpoint", {"Event": "die", "Tenant": "default", "EndpointID": other.name})

    for family in VIPS:
        ask = partial(providers_seen, client.place(family), port=80, times=1)
        assert await eventually(ask, lambda names: names == {REFUSED})


@OVS_MODES_IN_SOAK
@BRIDGE_IN_SOAK
async def test_s4_s7_the_vip_is_kept_until_the_service_is_deleted(lab: NetLab) -> None:
    """S4, S7, CVE-2021-25736: a port changes on the same VIPs; after deletion the VIPs are free."""
    one, _ = await start(lab)
    client, provider = await one.pod("client", network="net"), await one.pod("provider", network="net")
    await label(lab, provider, app="web")
    await put_service(lab)
    changed: dict[str, object] = {**SERVICE, "selectors": ["app=web"], "ports": ["81:8080:TCP"]}
    (await lab.rest.put("serviceLBs", **changed)).accepted()
    assert await addresses(lab) == VIPS
    for family in VIPS:
        async with serving_names([provider], port=8080, family=family):
            ask = partial(providers_seen, client.place(family), times=1)
            await eventually(partial(ask, port=81), lambda names: names == {provider.name})
            assert await ask(port=80) == {REFUSED}
    (await lab.rest.delete("serviceLBs", "default:shop")).accepted()
    for family in VIPS:
        async with serving_names([provider], port=8080, family=family):
            ask = partial(providers_seen, client.place(family), port=81, times=1)
            await eventually(ask, lambda names: names == {NO_ANSWER})
    reuser = await one.pod("reuser", network="net", address=f"{VIPS[4]}/24")
    other = await one.pod("other", network="net", address=f"{VIPS[6]}/64")
    for family, taker in ((4, reuser), (6, other)):
        async with serving_names([taker], port=81, family=family):
            ask = partial(providers_seen, client.place(family), port=81, times=1)
            await eventually(ask, {taker.name}.__eq__)


@OVS_MODES_IN_SOAK
@BRIDGE_IN_SOAK
async def test_s6_services_work_while_the_agent_is_down_and_after_its_restart(lab: NetLab) -> None:
    """S6: connections are load balanced while the agent is down, and changes apply after its restart."""
    one, two = await start(lab)
    client, near, far = (
        await one.pod("client", network="net"),
        await one.pod("near", network="net"),
        await two.pod("far", network="net"),
    )
    await put_service(lab)
    for pod in (near, far):
        await label(lab, pod, **LABELS)
    await assert_providers_seen(client, [near, far])
    one.kill()
    await assert_providers_seen(client, [near, far])
    await far.remove()
    await one.start()
    await assert_providers_seen(client, [near])


async def test_s5_services_change_after_a_leader_failover(isolated: None) -> None:
    """S5: the leader is killed; with the next leader a service is updated, created and deleted."""
    async with open_lab(store="etcd") as lab:
        assert lab.etcd is not None
        flags = ("--leader-ttl", "2", "--etcd-endpoints", ",".join(lab.etcd.endpoints))
        folder = lab.directory / "standby"
        folder.mkdir()
        async with MasterProcess(folder, *flags) as standby, client(standby.url) as rest:
            await lab.network("net", **NET)
            host = await lab.host("one")
            consumer, provider = await host.pod("consumer", network="net"), await host.pod("provider", network="net")
            await label(lab, provider, **LABELS)
            await put_service(lab)
            await assert_providers_seen(consumer, [provider])
            lab.master.kill()
            lab.rest = rest
            other = SERVICE | {"serviceName": "other", "ipAddress": "10.1.0.201", "ipv6Address": "fd00:1::201"}
            await eventually(lambda: rest.put("serviceLBs", **other), lambda answer: answer.status == 200)
            (await rest.delete("serviceLBs", "default:shop")).accepted()

            for family, vip in VIPS.items():
                ask = partial(query_backend, consumer.place(family), port=80)
                async with serving_names([provider], port=8080, family=family):
                    await eventually(partial(ask, vip + 1), lambda name: name == provider.name)
                    await eventually(partial(ask, vip), lambda name: name == NO_ANSWER)


@OVS_MODES_IN_SOAK
@BRIDGE_IN_SOAK
async def test_the_host_is_load_balanced_like_a_pod(lab: NetLab) -> None:
    """Connections from the host netns are load balanced like those from a pod."""
    one, two = await start(lab)
    provider, other = await one.pod("provider", network="net"), await two.pod("other", network="net")
    await put_service(lab)
    for pod in (provider, other):
        await label(lab, pod, **LABELS)
    for host, family in product((one, two), VIPS):
        own = ip_address(host.address if family == 4 else f"fd77:6566:7400::{host.address}")
        async with serving_names([provider, other], port=8080, family=family):
            with Namespace.open(host.netns) as machine:
                ask = partial(providers_seen, NetnsAddress(machine, own), port=80)
                await eventually(ask, lambda names: names == {"provider", "other"})


@ON_ALL
async def test_svcstats_by_client_service_and_provider(lab: NetLab) -> None:
    """W45: with the addresses in the right fields, in both directions."""
    one, two = await start(lab)
    client, provider = await one.pod("client", network="net"), await two.pod("provider", network="net")
    await put_service(lab)
    await label(lab, provider, **LABELS)
    await assert_providers_seen(client, [provider])
    stats = svcstats(one)
    assert set(stats) == {str(client.address(family)) for family in VIPS}
    for family, vip in VIPS.items():
        shown = stats[str(client.address(family))]
        assert (shown["EndpointIP"], shown["VrfName"]) == (str(client.address(family)), "default")
        assert [(each["Protocol"], each["SvcPort"], each["ProvPort"]) for each in shown["PortStats"]] == [
            ("TCP", "80", "8080"),
            ("UDP", "643", "7070"),
        ]
        for each in shown["PortStats"]:
            assert each["ServiceIP"] == str(vip)
            assert set(each["ProvStats"]) == {str(provider.address(family))}
            counts = each["ProvStats"][str(provider.address(family))]
            assert all(counts[name] > 0 for name in ("PacketsIn", "BytesIn", "PacketsOut", "BytesOut"))
    assert svcstats(two) == {}


def svcstats(host: Host) -> dict[str, Any]:
    command = ["nsenter", f"--net={host.netns}", "--", "curl", "-sf", "http://127.0.0.1:9090/svcstats"]
    done = subprocess.run(command, capture_output=True, check=True, timeout=DEADLINE)
    shown: dict[str, Any] = json.loads(done.stdout)
    return shown


@ALL_IN_SOAK
async def test_n6_tenants_with_the_same_service_are_isolated(lab: NetLab) -> None:
    """N6, S7: the same name and VIPs in two tenants; each reaches its own providers only."""
    one, two = await asyncio.gather(lab.host("one"), lab.host("two"))
    clients: dict[str, Pod] = {}
    providers: dict[str, Pod] = {}
    for tenant in ("blue", "red"):
        await lab.tenant(tenant)
        await lab.network("net", tenant=tenant, **NET)
        (await lab.rest.put("serviceLBs", **(SERVICE | ASKED_FOR | {"tenantName": tenant}))).accepted()
        clients[tenant] = await one.pod(f"{tenant}-client", tenant=tenant, network="net")
        providers[tenant] = await two.pod(f"{tenant}-provider", tenant=tenant, network="net")
        call = {"Event": "start", "Tenant": tenant, "EndpointID": providers[tenant].name, "Labels": LABELS}
        (await lab.rest.post("/plugin/updateEndpoint", call)).accepted()
    assert providers["blue"].address() == providers["red"].address()
    for family in VIPS:
        async with serving_names(providers.values(), port=8080, family=family):
            for tenant, client in clients.items():
                await eventually(
                    partial(providers_seen, client.place(family), port=80), {providers[tenant].name}.__eq__
                )
    await providers["blue"].remove()
    for family in VIPS:
        async with serving_names([providers["red"]], port=8080, family=family):
            await eventually(partial(providers_seen, clients["blue"].place(family), port=80, times=1), {REFUSED}.__eq__)
            assert await providers_seen(clients["red"].place(family), port=80) == {providers["red"].name}
