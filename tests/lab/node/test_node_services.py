"""Contiv's services in a lab of two hosts: providers come and go, and the address answers (facts 10.7)."""

from __future__ import annotations

import asyncio
import json
import subprocess
from ipaddress import IPv4Address
from typing import Any

from weft.adapters.linux.netns import Namespace
from weft.testing.hosts import Host, Pod
from weft.testing.masters import MasterProcess, client
from weft.testing.netlab import NetLab, open_lab
from weft.testing.served import NOBODY, REFUSED, hears, saying_names
from weft.testing.traffic import TCP, UDP, Place, Transport
from weft.testing.waiting import DEADLINE, eventually

LABELS = {"app": "web", "tier": "front", "zone": "a", "colour": "green"}
SERVICE: dict[str, object] = {
    "tenantName": "default",
    "serviceName": "shop",
    "networkName": "net",
    "selectors": [f"{key}={value}" for key, value in LABELS.items()],
    "ports": ["80:8080:TCP", "643:7070:UDP"],
}
VIP = IPv4Address("10.1.0.200")
TRANSPORTS = ((TCP, 80, 8080), (UDP, 643, 7070))


async def start(lab: NetLab) -> tuple[Host, Host]:
    await lab.network("net", subnet="10.1.0.0/24", gateway="10.1.0.254")
    one, two = await asyncio.gather(lab.host("one"), lab.host("two"))
    return one, two


async def label(lab: NetLab, pod: Pod, **labels: str) -> None:
    """The pod's container has started, with these labels."""
    call = {"Event": "start", "Tenant": "default", "EndpointID": pod.name, "Labels": labels}
    (await lab.rest.post("/plugin/updateEndpoint", call)).accepted()


async def put_service(lab: NetLab, **members: object) -> str:
    """Create or change the service; its address."""
    (await lab.rest.put("serviceLBs", **SERVICE, **members)).accepted()
    oper = await lab.rest.oper("serviceLBs", "default:shop")
    return str(oper["serviceVip"])


async def heard(client: Pod, *, port: int, transport: Transport, times: int = 24) -> set[str]:
    """All that are heard at the service's address."""
    return {await hears(client.place(), VIP, port=port, transport=transport) for _ in range(times)}


async def all_are_heard(client: Pod, providers: list[Pod]) -> None:
    """Every provider answers by both transports, and nobody else, sooner or later."""
    wanted = {pod.name for pod in providers}
    for transport, port, target_port in TRANSPORTS:
        async with saying_names(providers, port=target_port, transport=transport):

            async def ask(transport: Transport = transport, port: int = port) -> set[str]:
                return await heard(client, port=port, transport=transport)

            await eventually(ask, lambda names: names == wanted)


async def test_s1_s2_s3_providers_come_and_go(lab: NetLab) -> None:
    """S1, S2, S3, W44: before the service and after it, on both hosts; consumers of any network hear all of them."""
    one, two = await start(lab)
    early, client = await one.pod("early", network="net"), await two.pod("client", network="net")
    await label(lab, early, **LABELS)
    assert await put_service(lab, ipAddress=str(VIP)) == str(VIP)
    await all_are_heard(client, [early])
    late = await two.pod("late", network="net")
    await label(lab, late, **LABELS, more="labels")
    await all_are_heard(client, [early, late])
    await lab.network("later", subnet="10.2.0.0/24", gateway="10.2.0.254")
    consumer = await one.pod("consumer", network="later")
    await all_are_heard(consumer, [early, late])
    await early.remove()
    await all_are_heard(consumer, [late])
    early = await one.pod("early", network="net")
    await label(lab, early, **LABELS)
    for each in (client, consumer, early):
        await all_are_heard(each, [early, late])


async def test_s8_labels_must_contain_the_selectors(lab: NetLab) -> None:
    """S8, W15, W22: more labels provide, fewer do not, and who provides no more is asked no more."""
    one, _ = await start(lab)
    client, provider, other = await asyncio.gather(
        *(one.pod(name, network="net") for name in ("client", "provider", "other"))
    )
    await put_service(lab, ipAddress=str(VIP))
    await label(lab, provider, **LABELS, more="labels")
    await label(lab, other, **dict(list(LABELS.items())[:3]))
    await all_are_heard(client, [provider])
    await label(lab, other, **LABELS)
    await label(lab, provider)
    await all_are_heard(client, [other])
    await lab.rest.post("/plugin/updateEndpoint", {"Event": "die", "Tenant": "default", "EndpointID": other.name})

    async def ask() -> str:
        return await hears(client.place(), VIP, port=80)

    assert await eventually(ask, lambda name: name == REFUSED)


async def test_s4_s7_the_address_is_kept_until_the_service_goes(lab: NetLab) -> None:
    """S4, S7: another port at the same address; then nobody is there, and the address is free."""
    one, _ = await start(lab)
    client, provider = await one.pod("client", network="net"), await one.pod("provider", network="net")
    await label(lab, provider, app="web")
    await put_service(lab, ipAddress=str(VIP))
    changed: dict[str, object] = {**SERVICE, "selectors": ["app=web"], "ports": ["81:8080:TCP"]}
    (await lab.rest.put("serviceLBs", **changed)).accepted()
    assert (await lab.rest.oper("serviceLBs", "default:shop"))["serviceVip"] == str(VIP)

    async def ask(port: int) -> str:
        return await hears(client.place(), VIP, port=port)

    async with saying_names([provider], port=8080):
        await eventually(lambda: ask(81), lambda name: name == provider.name)
        assert await ask(80) == REFUSED
        (await lab.rest.delete("serviceLBs", "default:shop")).accepted()
        await eventually(lambda: ask(81), lambda name: name == NOBODY)
    heir = await one.pod("heir", network="net", address=f"{VIP}/24")
    async with saying_names([heir], port=81):
        assert await eventually(lambda: ask(81), lambda name: name == heir.name)


async def test_s6_services_go_on_without_the_agent_and_after_it(lab: NetLab) -> None:
    """S6: connections are balanced while the agent is down, and what was changed meanwhile comes into force."""
    one, two = await start(lab)
    client, near, far = (
        await one.pod("client", network="net"),
        await one.pod("near", network="net"),
        await two.pod("far", network="net"),
    )
    await put_service(lab, ipAddress=str(VIP))
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
            await lab.network("net", subnet="10.1.0.0/24", gateway="10.1.0.254")
            host = await lab.host("one")
            consumer, provider = await host.pod("consumer", network="net"), await host.pod("provider", network="net")
            await label(lab, provider, **LABELS)
            await put_service(lab, ipAddress=str(VIP))
            await all_are_heard(consumer, [provider])
            lab.master.kill()
            lab.rest = rest
            other = SERVICE | {"serviceName": "other", "ipAddress": "10.1.0.201"}
            await eventually(lambda: rest.put("serviceLBs", **other), lambda answer: answer.status == 200)
            (await rest.delete("serviceLBs", "default:shop")).accepted()

            async def ask(address: str) -> str:
                return await hears(consumer.place(), IPv4Address(address), port=80)

            async with saying_names([provider], port=8080):
                await eventually(lambda: ask("10.1.0.201"), lambda name: name == provider.name)
                await eventually(lambda: ask(str(VIP)), lambda name: name == NOBODY)


async def test_the_host_is_a_client_too(lab: NetLab) -> None:
    """From the host's own namespace the address balances as from a pod."""
    one, two = await start(lab)
    provider, other = await one.pod("provider", network="net"), await two.pod("other", network="net")
    await put_service(lab, ipAddress=str(VIP))
    for pod in (provider, other):
        await label(lab, pod, **LABELS)
    async with saying_names([provider, other], port=8080):
        for host in (one, two):
            with Namespace.open(host.machine) as machine:
                place = Place(machine, IPv4Address(host.address))

                async def ask(place: Place = place) -> set[str]:
                    return {await hears(place, VIP, port=80) for _ in range(24)}

                await eventually(ask, lambda names: names == {"provider", "other"})


async def test_svcstats_tell_who_used_what(lab: NetLab) -> None:
    """W45: by client, service and provider, with the addresses where they belong, in both directions."""
    one, two = await start(lab)
    client, provider = await one.pod("client", network="net"), await two.pod("provider", network="net")
    await put_service(lab, ipAddress=str(VIP))
    await label(lab, provider, **LABELS)
    await all_are_heard(client, [provider])
    stats = svcstats(one)
    assert set(stats) == {str(client.address())}
    told = stats[str(client.address())]
    assert (told["EndpointIP"], told["VrfName"]) == (str(client.address()), "default")
    assert [(each["Protocol"], each["SvcPort"], each["ProvPort"]) for each in told["PortStats"]] == [
        ("TCP", "80", "8080"),
        ("UDP", "643", "7070"),
    ]
    for each in told["PortStats"]:
        assert each["ServiceIP"] == str(VIP)
        assert set(each["ProvStats"]) == {str(provider.address())}
        counts = each["ProvStats"][str(provider.address())]
        assert all(counts[name] > 0 for name in ("PacketsIn", "BytesIn", "PacketsOut", "BytesOut"))
    assert svcstats(two) == {}


def svcstats(host: Host) -> dict[str, Any]:
    command = ["nsenter", f"--net={host.machine}", "--", "curl", "-sf", "http://127.0.0.1:9090/svcstats"]
    done = subprocess.run(command, capture_output=True, check=True, timeout=DEADLINE)
    told: dict[str, Any] = json.loads(done.stdout)
    return told
