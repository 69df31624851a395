"""Items of the CNI checklist about the effect on the node (docs/cni-conformance.md), for IPv4 and IPv6."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import struct
from pathlib import Path
from typing import Any

import pytest
from tests.support import inventory

from weft.cni.errors import CniError, Code
from weft.cni.request import AttachmentId
from weft.kernel.netns import Namespace
from weft.lab.cni.libcni import Output
from weft.lab.hosts import Host, Pod
from weft.lab.netlab import NetLab
from weft.lab.servers.processes import DEADLINE
from weft.lab.waiting import until

NET = "net"
CONFIG: dict[str, Any] = {"cniVersion": "1.1.0", "name": "weft", "type": "weft-cni"}
GATEWAYS = {4: "10.1.255.254", 6: "2001:db8:1::1"}


@pytest.fixture
async def host(lab: NetLab) -> Host:
    await lab.network(
        NET, subnet="10.1.0.0/16", gateway=GATEWAYS[4], ipv6Subnet="2001:db8:1::/64", ipv6Gateway=GATEWAYS[6]
    )
    return await lab.host("one")


async def add(host: Host, name: str, config: dict[str, Any] = CONFIG, **variables: str) -> Output:
    """Call ADD with an explicit configuration, for eth0 of a new namespace."""
    named = {"containerid": name, "ifname": "eth0", "args": f"io.contiv.network={NET}"} | variables
    if "netns" not in named:
        named["netns"] = str(host.make_netns(name))
    return await host.call("ADD", config, **named)


async def check(host: Host, result: dict[str, Any], **changes: str) -> Output:
    """Call CHECK for pod `a` with an explicit result."""
    variables = {"containerid": "a", "ifname": "eth0", "netns": str(host.make_netns("a"))} | changes
    return await host.call("CHECK", CONFIG | {"prevResult": result}, **variables)


def error_of(output: Output) -> CniError:
    error = CniError.decode(output.stdout)
    assert error is not None, output
    return error


def links(namespace: Path) -> dict[str, dict[str, Any]]:
    return {link["ifname"]: link for link in inventory.run_json(namespace, "ip", "-j", "-d", "addr")}


def kernel_state(host: Host, pod: Pod) -> list[Any]:
    """The configured kernel state of a pod and its tenant netns, without what the kernel adds itself."""
    commands = (("link",), ("addr", "show", "scope", "global"), ("neigh", "show", "nud", "permanent"))
    places = (pod.netns, *inventory.tenant_netns(host).values())
    found = [inventory.run_json(place, "ip", "-j", *question) for place in places for question in commands]
    for link in itertools.chain.from_iterable(found):
        link.pop("operstate", None)  # changes asynchronously when the link comes up
    for place, family in itertools.product(places, ("-4", "-6")):
        routes = inventory.run_json(place, "ip", "-j", family, "route")
        found.append([route for route in routes if route["protocol"] != "kernel"])
    return [*found, *(inventory.run_json(space, "nft", "-j", "-s", "list", "ruleset") for space in places[1:])]


async def assert_nothing_left(lab: NetLab, host: Host) -> None:
    """Wait until no address is in use and no device of a pod is on the host (C-071, P-30)."""
    await inventory.wait_consistent(lab)
    assert inventory.stored(await lab.rest.state()) == set()
    await until(lambda: not {each for space in inventory.tenant_netns(host).values() for each in _port_devices(space)})


def _port_devices(space: Path) -> set[str]:
    return {name for name in inventory.devices(space) if name.startswith(("wp", "wgone"))}


async def answers_ping(pod: Pod, target: str, *, family: int) -> bool:
    """Whether a single echo request is answered."""
    kinds = {4: (socket.AF_INET, socket.IPPROTO_ICMP, 8, 0), 6: (socket.AF_INET6, socket.IPPROTO_ICMPV6, 128, 129)}
    domain, protocol, request, reply = kinds[family]
    with pod.namespace.open_socket(domain, socket.SOCK_RAW, protocol) as sender:
        sender.setblocking(False)
        checksum = 0xFFFF - (request << 8)  # of an otherwise zero packet; for ICMPv6 the kernel computes it
        sender.sendto(struct.pack("!BBHI", request, 0, checksum, 0), (target, 0))
        async with asyncio.timeout(DEADLINE):
            while True:
                packet = await asyncio.get_running_loop().sock_recv(sender, 2048)
                if packet[20 if family == 4 else 0] == reply:
                    return True


class TestAdd:
    async def test_the_interface_is_up_and_configured_as_in_the_result(self, host: Host) -> None:
        """C-040, C-045, P-02, P-06, P-07, P-17: both ends up, one address per family, default route to the gateway."""
        pod = await host.pod("a", network=NET)
        outer, inner = pod.result.interfaces
        assert (outer.sandbox, inner.name, inner.sandbox) == ("", "eth0", str(pod.netns))
        assert {each.interface for each in pod.result.addresses} == {1}
        link = links(pod.netns)["eth0"]
        assert (link["operstate"], link["address"], link["mtu"]) == ("UP", inner.mac, inner.mtu)
        found = {(each["local"], each["prefixlen"]) for each in link["addr_info"] if each["scope"] == "global"}
        assert found == {(str(pod.address(4)), 16), (str(pod.address(6)), 64)}
        assert links(inventory.tenant_netns(host)["default"])[outer.name]["operstate"] == "UP"
        for family, gateway in GATEWAYS.items():
            routes = inventory.run_json(pod.netns, "ip", "-j", f"-{family}", "route", "show", "default")
            assert [(each["gateway"], each["dev"], each.get("prefsrc")) for each in routes] == [(gateway, "eth0", None)]
            result = next(each for each in pod.result.routes if each.target.version == family)
            assert (str(result.gateway), result.target.prefixlen) == (gateway, 0)

    async def test_the_gateway_answers_the_first_packet(self, host: Host) -> None:
        """P-09, P-18: the first packet after ADD is forwarded, and the tenant netns forwards both families."""
        pod = await host.pod("a", network=NET)
        for family, gateway in GATEWAYS.items():
            assert await answers_ping(pod, gateway, family=family)
        with host.tenants.open("default") as space:
            for switch in ("ipv4/ip_forward", "ipv6/conf/all/forwarding"):
                assert space.run(lambda switch=switch: Path("/proc/sys/net", switch).read_text()) == "1\n"  # type: ignore[misc]

    async def test_no_address_is_tentative_when_add_returns(self, host: Host) -> None:
        """P-23: duplicate address detection is complete or disabled."""
        pod = await host.pod("a", network=NET)
        configured = [each for each in links(pod.netns)["eth0"]["addr_info"] if each["scope"] == "global"]
        assert [each for each in configured if each.get("tentative")] == []

    async def test_a_namespace_with_ipv6_disabled(self, lab: NetLab, host: Host) -> None:
        """P-23: some runtimes disable IPv6; ADD enables it on an interface that gets an IPv6 address."""
        with Namespace.open(host.make_netns("a")) as netns:
            netns.write_sysctls({f"net/ipv6/conf/{where}/disable_ipv6": "1" for where in ("all", "default")})
        pod, other = await host.pod("a", network=NET), await host.pod("b", network=NET)
        for family in (4, 6):
            assert await pod.reaches(other, family=family)
        await pod.check()

    async def test_a_requested_mac_address(self, host: Host) -> None:
        """P-04."""
        mac = "02:00:5e:10:20:30"
        config = CONFIG | {"runtimeConfig": {"mac": mac}}
        result = json.loads((await add(host, "a", config)).stdout)
        assert result["interfaces"][1]["mac"] == mac
        assert links(host.make_netns("a"))["eth0"]["address"] == mac

    async def test_an_interface_name_that_exists(self, lab: NetLab, host: Host) -> None:
        """C-042: `lo` exists already and is not changed."""
        output = await add(host, "a", ifname="lo")
        assert (output.exit_code, "lo" in error_of(output).message) == (1, True)
        assert inventory.devices(host.make_netns("a")) == set()
        await assert_nothing_left(lab, host)

    async def test_prev_result_is_extended(self, host: Host) -> None:
        """C-044: entries of prevResult are unchanged, ours are appended."""
        before = {
            "cniVersion": "1.1.0",
            "interfaces": [{"name": "dummy0", "mac": "02:00:00:00:00:01", "sandbox": "/x"}],
            "ips": [{"address": "192.0.2.77/24", "interface": 0}],
            "routes": [{"dst": "198.51.100.0/24", "gw": "192.0.2.1"}],
            "dns": {"nameservers": ["192.0.2.53"]},
        }
        result = json.loads((await add(host, "a", CONFIG | {"prevResult": before})).stdout)
        for member in ("interfaces", "ips", "routes"):
            assert result[member][:1] == before[member], result
        assert result["dns"] == before["dns"]
        assert [each["interface"] for each in result["ips"]] == [0, 2, 2]
        assert result["interfaces"][2]["name"] == "eth0"

    async def test_the_host_netns_is_rejected(self, lab: NetLab, host: Host) -> None:
        """C-015: code 8, unless CNI_NETNS_OVERRIDE is set."""
        before = inventory.devices(host.netns)
        output = await add(host, "a", netns=str(host.netns), ifname="weft0")
        assert error_of(output).code == Code.BAD_NETNS
        assert inventory.devices(host.netns) == before
        await assert_nothing_left(lab, host)
        meant = await add(host, "a", netns=str(host.netns), ifname="weft0", netns_override="1")
        assert meant.exit_code == 0, meant
        assert inventory.devices(host.netns) >= before | {"weft0"}
        assert (await host.call("DEL", containerid="a", ifname="weft0")).exit_code == 0
        assert "weft0" not in inventory.devices(host.netns)

    async def test_requested_addresses(self, lab: NetLab, host: Host) -> None:
        """P-43, P-12: allocated; rejected without a trace if in use, out of subnet, or the gateway's."""
        for family, wanted in ((4, "10.1.7.7"), (6, "2001:db8:1::7:7")):
            pod = await host.pod(f"v{family}", network=NET, address=wanted)
            assert str(pod.address(family)) == wanted
            for refused in (wanted, GATEWAYS[family], {4: "10.99.0.1", 6: "2001:db8:99::1"}[family]):
                with pytest.raises(CniError, match=refused):
                    await host.pod("late", network=NET, address=refused)
            await pod.remove()
        await host.cni.delete(host.network, host.attachment("late"))
        await assert_nothing_left(lab, host)

    async def test_a_second_interface_gets_its_own_address(self, host: Host) -> None:
        """C-049, P-42."""
        pod, other = await host.pod("a", network=NET), await host.pod("b", network=NET)
        second_attachment = host.attachment("a", network=NET, ifname="net1")
        second = await host.cni.add(host.network, second_attachment)
        through_net1 = Pod(host, second_attachment, pod.namespace, second)
        for each, family in itertools.product((pod, through_net1), (4, 6)):
            assert await each.eventually_reaches(other, family=family)
            assert await other.eventually_reaches(each, family=family)
        await pod.check()
        await host.cni.check(host.network, second_attachment)
        assert {str(each.address.ip) for each in second.addresses}.isdisjoint(
            {str(pod.address(4)), str(pod.address(6))}
        )
        with pytest.raises(CniError, match="already attached"):
            await host.cni.add(host.network, second_attachment)
        await host.cni.delete(host.network, second_attachment)
        await pod.check()
        for family in (4, 6):
            assert not inventory.run_json(pod.netns, "ip", "-j", f"-{family}", "rule", "show", "priority", "1000")
            assert await other.eventually_reaches(pod, family=family)


class TestDel:
    async def test_del_of_an_unknown_attachment(self, lab: NetLab, host: Host) -> None:
        """C-064, P-31, P-46: succeeds with and without a namespace, repeatedly."""
        for netns in ({"netns": str(host.make_netns("a"))}, {"netns": "/nowhere"}, {}):
            for _ in range(2):
                output = await host.call("DEL", containerid="a", ifname="eth0", **netns)
                assert (output.exit_code, output.stdout) == (0, b"")
        await assert_nothing_left(lab, host)

    async def test_del_after_the_interface_was_deleted(self, lab: NetLab, host: Host) -> None:
        """C-062: deleted on either side."""
        a, b = await host.pod("a", network=NET), await host.pod("b", network=NET)
        inventory.run(a.netns, "ip link del eth0")
        inventory.run(inventory.tenant_netns(host)["default"], f"ip link del {b.result.interfaces[0].name}")
        for pod in (a, b):
            await pod.remove()
        await assert_nothing_left(lab, host)

    async def test_nothing_is_left_on_the_host(self, lab: NetLab, host: Host) -> None:
        """C-060, C-063, C-067, C-071, P-30, P-32: device, routes, rules and addresses of both families."""
        pods = [await host.pod(name, network=NET) for name in "abc"]
        await pods[0].remove()
        host.remove_netns("b")
        assert (await host.call("DEL", containerid="b", ifname="eth0", netns=str(pods[1].netns))).exit_code == 0
        for _ in range(2):
            assert (await host.call("DEL", containerid="c", ifname="eth0", netns="")).exit_code == 0
        assert "eth0" not in inventory.devices(pods[2].netns), "the attachment log has the namespace path"
        await assert_nothing_left(lab, host)

    async def test_del_with_an_invalid_configuration_fails(self, host: Host) -> None:
        """C-070: and does not change the attachment."""
        pod = await host.pod("a", network=NET)
        output = await host.call("DEL", CONFIG | {"name": ""}, containerid="a", ifname="eth0")
        assert error_of(output).code == Code.BAD_CONFIG
        await pod.check()


class TestCheck:
    async def test_check_changes_nothing(self, host: Host) -> None:
        """C-085, C-088: neither right after ADD nor when something is broken."""
        pod = await host.pod("a", network=NET)
        before = kernel_state(host, pod)
        await pod.check()
        assert kernel_state(host, pod) == before
        inventory.run(pod.netns, "ip -6 route del default")
        before = kernel_state(host, pod)
        with pytest.raises(CniError, match="::/0"):
            await pod.check()
        assert kernel_state(host, pod) == before

    async def test_check_ignores_additions_of_later_plugins(self, host: Host) -> None:
        """C-081, C-083: in the kernel and in the result."""
        result, netns = json.loads((await add(host, "a")).stdout), host.make_netns("a")
        inventory.run(netns, "ip link add more type veth peer name most")
        inventory.run(netns, "ip addr add 192.0.2.9/32 dev eth0")
        result["interfaces"].append({"name": "more", "sandbox": str(netns)})
        result["ips"].append({"address": "192.0.2.9/32", "interface": 1})
        result["routes"].append({"dst": "198.51.100.0/24"})
        output = await check(host, result)
        assert (output.exit_code, output.stdout) == (0, b"")

    async def test_check_rejects_a_result_of_another_attachment(self, host: Host) -> None:
        """C-082, C-087, P-34: another sandbox, another MAC, another address."""
        result = json.loads((await add(host, "a")).stdout)
        other = host.make_netns("other")
        assert (await check(host, result)).exit_code == 0
        elsewhere = await check(host, result, netns=str(other))
        assert str(other) in error_of(elsewhere).details
        for member, value in (("sandbox", str(other)), ("mac", "02:00:00:00:00:77")):
            altered = json.loads(json.dumps(result))
            altered["interfaces"][1][member] = value
            assert value in error_of(await check(host, altered)).details
        altered = json.loads(json.dumps(result))
        own = altered["ips"].pop()["address"].partition("/")[0]
        assert own in error_of(await check(host, altered)).details


class TestGc:
    async def test_gc_removes_every_unlisted_attachment(self, lab: NetLab, host: Host) -> None:
        """C-096, C-099: per interface, with and without a namespace, twice; pods of other networks are not touched."""
        kept, lost = await host.pod("kept", network=NET), await host.pod("lost", network=NET)
        second = host.attachment("kept", network=NET, ifname="net1")
        await host.cni.add(host.network, second)
        assert (await add(host, "foreign", CONFIG | {"name": "another"})).exit_code == 0
        host.remove_netns("lost")
        listed = CONFIG | {"cni.dev/valid-attachments": [{"containerID": "kept", "ifname": "eth0"}]}
        for _ in range(2):
            output = await host.call("GC", listed, path="/x")
            assert (output.exit_code, output.stdout) == (0, b""), output
            await inventory.wait_consistent(lab)
            assert {each.address for each in inventory.routed(host)} >= {str(kept.address(4)), str(kept.address(6))}
            assert {str(lost.address(4)), str(lost.address(6))}.isdisjoint(
                {each.address for each in inventory.routed(host)}
            )
        await until(
            lambda: inventory.devices(kept.netns) == {"eth0"}
        )  # net1 is renamed first and deleted asynchronously
        assert "eth0" in inventory.devices(host.make_netns("foreign"))
        await host.cni.gc(host.network, [AttachmentId("kept", "eth0")])
        await kept.check()


async def test_status_before_the_first_add(host: Host) -> None:
    """P-35."""
    output = await host.call("STATUS", CONFIG)
    assert (output.exit_code, output.stdout) == (0, b"")
