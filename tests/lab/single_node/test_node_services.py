"""Contiv's services in a lab of two hosts: providers come and go, and the address answers (contiv 10.7)."""

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
from weft.lab.http_services import NOBODY, REFUSED, hears, saying_names
from weft.lab.netlab import NetLab, open_lab
from weft.lab.servers.masters import MasterProcess, client
from weft.lab.traffic import TCP, UDP, IPAddress, Place, Transport
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
    """The pod's container has started, with these labels."""
    call = {"Event": "start", "Tenant": "default", "EndpointID": pod.name, "Labels": labels}
    (await lab.rest.post("/plugin/updateEndpoint", call)).accepted()


async def put_service(lab: NetLab, **members: object) -> None:
    """Create or change the service, which has the addresses that were asked for."""
    (await lab.rest.put("serviceLBs", **(SERVICE | ASKED_FOR | members))).accepted()
    assert await addresses(lab) == VIPS


async def addresses(lab: NetLab) -> dict[int, IPAddress]:
    """The addresses of the service, by family."""
    oper = await lab.rest.oper("serviceLBs", "default:shop")
    return {4: ip_address(oper["serviceVip"]), 6: ip_address(oper["ipv6ServiceVip"])}


async def heard(client: Place, *, port: int, transport: Transport = TCP, times: int = 24) -> set[str]:
    """All that are heard at the service's address of the client's family."""
    vip = VIPS[client.address.version]
    return {await hears(client, vip, port=port, transport=transport) for _ in range(times)}


async def all_are_heard(client: Pod, providers: list[Pod]) -> None:
    """Every provider answers by both transports and families, and nobody else, sooner or later.

    W45: no client is bound to the provider that it drew first.
    """
    wanted = {pod.name for pod in providers}
    for (transport, port, target_port), family in product(TRANSPORTS, VIPS):
        async with saying_names(providers, port=target_port, transport=transport, family=family):
            ask = partial(heard, client.place(family), port=port, transport=transport)
            await eventually(ask, lambda names: names == wanted)


@ON_OVS_TOO
@BOTH_MODES
async def test_s1_s2_s3_providers_come_and_go(lab: NetLab) -> None:
    """S1, S2, S3, W44: before the service and after it, on both hosts; consumers of any network hear all of them."""
    one, two = await start(lab)
    early, client = await one.pod("early", network="net"), await two.pod("client", network="net")
    await label(lab, early, **LABELS)
    await put_service(lab)
    await all_are_heard(client, [early])
    late = await two.pod("late", network="net")
    await label(lab, late, **LABELS, more="labels")
    await all_are_heard(client, [early, late])
    await lab.network("later", subnet="10.2.0.0/24", ipv6Subnet="fd00:2::/64")
    consumer = await one.pod("consumer", network="later")
    await all_are_heard(consumer, [early, late])
    await early.remove()
    await all_are_heard(consumer, [late])
    early = await one.pod("early", network="net")
    await label(lab, early, **LABELS)
    for each in (client, consumer, early):
        await all_are_heard(each, [early, late])


@ALL_IN_SOAK
async def test_s8_labels_must_contain_the_selectors(lab: NetLab) -> None:
    """S8, W15, W21, W22: more labels provide, fewer do not, who provides no more is asked no more; `tcp` is TCP."""
    one, _ = await start(lab)
    client, provider, other = await asyncio.gather(
        *(one.pod(name, network="net") for name in ("client", "provider", "other"))
    )
    await put_service(lab, ports=["80:8080:tcp", "643:7070:Udp"])
    await label(lab, provider, **LABELS, more="labels")
    await label(lab, other, **dict(list(LABELS.items())[:3]))
    await all_are_heard(client, [provider])
    await label(lab, other, **LABELS)
    await label(lab, provider)
    await all_are_heard(client, [other])
    await lab.rest.post("/plugin/updateEndpoint", {"Event": "die", "Tenant": "default", "EndpointID": other.name})

    for family in VIPS:
        ask = partial(heard, client.place(family), port=80, times=1)
        assert await eventually(ask, lambda names: names == {REFUSED})


@OVS_MODES_IN_SOAK
@BRIDGE_IN_SOAK
async def test_s4_s7_the_address_is_kept_until_the_service_goes(lab: NetLab) -> None:
    """S4, S7, CVE-2021-25736: another port at the same addresses; then nobody is there, and the addresses are free."""
    one, _ = await start(lab)
    client, provider = await one.pod("client", network="net"), await one.pod("provider", network="net")
    await label(lab, provider, app="web")
    await put_service(lab)
    changed: dict[str, object] = {**SERVICE, "selectors": ["app=web"], "ports": ["81:8080:TCP"]}
    (await lab.rest.put("serviceLBs", **changed)).accepted()
    assert await addresses(lab) == VIPS
    for family in VIPS:
        async with saying_names([provider], port=8080, family=family):
            ask = partial(heard, client.place(family), times=1)
            await eventually(partial(ask, port=81), lambda names: names == {provider.name})
            assert await ask(port=80) == {REFUSED}
    (await lab.rest.delete("serviceLBs", "default:shop")).accepted()
    for family in VIPS:
        async with saying_names([provider], port=8080, family=family):
            ask = partial(heard, client.place(family), port=81, times=1)
            await eventually(ask, lambda names: names == {NOBODY})
    heir = await one.pod("heir", network="net", address=f"{VIPS[4]}/24")
    other = await one.pod("other", network="net", address=f"{VIPS[6]}/64")
    for family, taker in ((4, heir), (6, other)):
        async with saying_names([taker], port=81, family=family):
            ask = partial(heard, client.place(family), port=81, times=1)
            await eventually(ask, {taker.name}.__eq__)


@OVS_MODES_IN_SOAK
@BRIDGE_IN_SOAK
async def test_s6_services_go_on_without_the_agent_and_after_it(lab: NetLab) -> None:
    """S6: connections are balanced while the agent is down, and what was changed meanwhile comes into force."""
    one, two = await start(lab)
    client, near, far = (
        await one.pod("client", network="net"),
        await one.pod("near", network="net"),
        await two.pod("far", network="net"),
    )
    await put_service(lab)
    for pod in (near, far):
        await label(lab, pod, **LABELS)
    await all_are_heard(client, [near, far])
    one.kill()
    await all_are_heard(client, [near, far])
    await far.remove()
    await one.start()
    await all_are_heard(client, [near])


async def test_s5_services_come_and_go_after_a_change_of_leader(apart: None) -> None:
    """S5: the leader is killed; with the next one a service is changed, made and deleted."""
    async with open_lab(store="etcd") as lab:
        assert lab.etcd is not None
        flags = ("--leader-ttl", "2", "--etcd-endpoints", ",".join(lab.etcd.endpoints))
        folder = lab.directory / "heir"
        folder.mkdir()
        async with MasterProcess(folder, *flags) as heir, client(heir.url) as rest:
            await lab.network("net", **NET)
            host = await lab.host("one")
            consumer, provider = await host.pod("consumer", network="net"), await host.pod("provider", network="net")
            await label(lab, provider, **LABELS)
            await put_service(lab)
            await all_are_heard(consumer, [provider])
            lab.master.kill()
            lab.rest = rest
            other = SERVICE | {"serviceName": "other", "ipAddress": "10.1.0.201", "ipv6Address": "fd00:1::201"}
            await eventually(lambda: rest.put("serviceLBs", **other), lambda answer: answer.status == 200)
            (await rest.delete("serviceLBs", "default:shop")).accepted()

            for family, vip in VIPS.items():
                ask = partial(hears, consumer.place(family), port=80)
                async with saying_names([provider], port=8080, family=family):
                    await eventually(partial(ask, vip + 1), lambda name: name == provider.name)
                    await eventually(partial(ask, vip), lambda name: name == NOBODY)


@OVS_MODES_IN_SOAK
@BRIDGE_IN_SOAK
async def test_the_host_is_a_client_too(lab: NetLab) -> None:
    """From the host's own namespace the addresses balance as from a pod."""
    one, two = await start(lab)
    provider, other = await one.pod("provider", network="net"), await two.pod("other", network="net")
    await put_service(lab)
    for pod in (provider, other):
        await label(lab, pod, **LABELS)
    for host, family in product((one, two), VIPS):
        own = ip_address(host.address if family == 4 else f"fd77:6566:7400::{host.address}")
        async with saying_names([provider, other], port=8080, family=family):
            with Namespace.open(host.machine) as machine:
                ask = partial(heard, Place(machine, own), port=80)
                await eventually(ask, lambda names: names == {"provider", "other"})


@ON_ALL
async def test_svcstats_tell_who_used_what(lab: NetLab) -> None:
    """W45: by client, service and provider, with the addresses where they belong, in both directions."""
    one, two = await start(lab)
    client, provider = await one.pod("client", network="net"), await two.pod("provider", network="net")
    await put_service(lab)
    await label(lab, provider, **LABELS)
    await all_are_heard(client, [provider])
    stats = svcstats(one)
    assert set(stats) == {str(client.address(family)) for family in VIPS}
    for family, vip in VIPS.items():
        told = stats[str(client.address(family))]
        assert (told["EndpointIP"], told["VrfName"]) == (str(client.address(family)), "default")
        assert [(each["Protocol"], each["SvcPort"], each["ProvPort"]) for each in told["PortStats"]] == [
            ("TCP", "80", "8080"),
            ("UDP", "643", "7070"),
        ]
        for each in told["PortStats"]:
            assert each["ServiceIP"] == str(vip)
            assert set(each["ProvStats"]) == {str(provider.address(family))}
            counts = each["ProvStats"][str(provider.address(family))]
            assert all(counts[name] > 0 for name in ("PacketsIn", "BytesIn", "PacketsOut", "BytesOut"))
    assert svcstats(two) == {}


def svcstats(host: Host) -> dict[str, Any]:
    command = ["nsenter", f"--net={host.machine}", "--", "curl", "-sf", "http://127.0.0.1:9090/svcstats"]
    done = subprocess.run(command, capture_output=True, check=True, timeout=DEADLINE)
    told: dict[str, Any] = json.loads(done.stdout)
    return told


@ALL_IN_SOAK
async def test_n6_tenants_with_the_same_service_never_meet(lab: NetLab) -> None:
    """N6, S7: the same name and addresses in two tenants; each hears its own providers, also when the other's go."""
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
        async with saying_names(providers.values(), port=8080, family=family):
            for tenant, client in clients.items():
                await eventually(partial(heard, client.place(family), port=80), {providers[tenant].name}.__eq__)
    await providers["blue"].remove()
    for family in VIPS:
        async with saying_names([providers["red"]], port=8080, family=family):
            await eventually(partial(heard, clients["blue"].place(family), port=80, times=1), {REFUSED}.__eq__)
            assert await heard(clients["red"].place(family), port=80) == {providers["red"].name}
