"""cnitool 1.3, the reference runtime, and chains with Debian's reference plugins."""

from __future__ import annotations

import json
from collections.abc import Mapping
from ipaddress import ip_interface
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from tests.support import inventory
from tests.support.runtimes import Ran, run

from weft.kernel.netns import Namespace
from weft.lab import traffic

if TYPE_CHECKING:
    from tests.e2e.conftest import Machine

SYSCTL = "net.ipv4.conf.eth0.log_martians"
TUNING: Mapping[str, object] = {"type": "tuning", "sysctl": {SYSCTL: "1"}}
ASKED = {
    "ips": ["10.224.3.7"],
    "mac": "02:11:22:33:44:55",
    "dns": {"servers": ["10.224.0.53"], "searches": ["blue.example"], "options": ["ndots:3"]},
}


class Attached(NamedTuple):
    """A namespace and its ADD result."""

    netns: Path
    result: Any

    @property
    def address(self) -> traffic.IPAddress:
        """Its address on our network; earlier plugins of a chain may have added others."""
        return ip_interface(self.result["ips"][-1]["address"]).ip

    async def eventually_reaches(self, other: Attached) -> bool:
        with Namespace.open(self.netns) as here, Namespace.open(other.netns) as there:
            places = traffic.NetnsAddress(here, self.address), traffic.NetnsAddress(there, other.address)
            return await traffic.eventually_reaches(*places, port=80)


class Cnitool(NamedTuple):
    """The program with a network, as run on the command line."""

    program: str
    network: str = "weft"

    async def try_(self, verb: str, netns: Path, **environment: str) -> Ran:
        variables = {"CNI_PATH": "/opt/cni/bin:/usr/lib/cni", **environment}
        return await run(
            "env",
            *(f"{name}={value}" for name, value in variables.items()),
            self.program,
            verb,
            self.network,
            str(netns),
        )

    async def run(self, verb: str, netns: Path, **environment: str) -> str:
        ran = await self.try_(verb, netns, **environment)
        assert ran.exit_code == 0, ran.output
        return ran.output

    async def add(self, netns: Path, **environment: str) -> Attached:
        return Attached(netns, json.loads(await self.run("add", netns, **environment)))


async def test_every_verb(machine: Machine, cnitool: str) -> None:
    """C-090 to C-097: GC without a list detaches only cnitool's cached attachments."""
    tool = Cnitool(cnitool)
    netns = [machine.host.make_netns(name) for name in ("a", "b")]
    await tool.run("status", netns[0])
    a, b = [await tool.add(each) for each in netns]
    assert {str(a.address), str(b.address)} == await machine.used_addresses()
    assert await a.eventually_reaches(b)
    assert await b.eventually_reaches(a)
    assert "already attached" in (await tool.try_("add", a.netns)).output
    await tool.run("check", a.netns)
    for _ in range(2):
        await tool.run("del", a.netns)
    assert "eth0" not in inventory.devices(a.netns)
    assert (await tool.try_("check", a.netns)).exit_code != 0
    await tool.run("gc", b.netns)
    assert "eth0" not in inventory.devices(b.netns)
    await machine.wait_until_clean()


async def test_requested_addresses_and_dns_are_in_the_result(machine: Machine, cnitool: str) -> None:
    """P-10, P-11, P-45: IP, MAC and DNS of `runtimeConfig`."""
    tool = Cnitool(cnitool)
    a = await tool.add(machine.host.make_netns("a"), CAP_ARGS=json.dumps(ASKED))
    assert str(a.address) == "10.224.3.7"
    assert a.result["dns"] == {"nameservers": ["10.224.0.53"], "search": ["blue.example"], "options": ["ndots:3"]}
    (link,) = (each for each in inventory.run_json(a.netns, "ip", "-j", "link") if each["ifname"] == "eth0")
    assert link["address"] == "02:11:22:33:44:55"
    b = await tool.add(machine.host.make_netns("b"))
    assert await b.eventually_reaches(a)
    for each in (a, b):
        await tool.run("del", each.netns)
    await machine.wait_until_clean()


async def test_port_mappings_and_bandwidth(machine: Machine, cnitool: str) -> None:
    """P-51, P-52: a used host port is rejected by name, and free again after DEL."""
    machine.write_list("declared", {"type": "weft-cni", "capabilities": {"portMappings": True, "bandwidth": True}})
    tool = Cnitool(cnitool, "declared")
    capabilities = {
        "portMappings": [{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}],
        "bandwidth": {"ingressRate": 1_000_000, "ingressBurst": 1_000_000},
    }
    a = await tool.add(machine.host.make_netns("a"), CAP_ARGS=json.dumps(capabilities))
    b = machine.host.make_netns("b")
    refused = await tool.try_("add", b, CAP_ARGS=json.dumps(capabilities))
    assert refused.exit_code != 0
    assert "tcp/8080" in refused.output
    await tool.run("del", a.netns)
    await tool.add(b, CAP_ARGS=json.dumps(capabilities))
    await tool.run("del", b)
    await machine.wait_until_clean()


@pytest.mark.parametrize("version", ["0.3.1", "0.4.0", "1.0.0"])
async def test_a_chain_of_loopback_weft_and_tuning(machine: Machine, cnitool: str, version: str) -> None:
    """P-50, P-53: each plugin gets the previous result, also in CHECK and DEL."""
    machine.write_list("chained", {"type": "loopback"}, {"type": "weft-cni"}, TUNING, version=version)
    tool = Cnitool(cnitool, "chained")
    a, b = [await tool.add(machine.host.make_netns(name)) for name in ("a", "b")]
    assert a.result["interfaces"][0]["name"] == "lo"
    assert a.result["interfaces"][a.result["ips"][-1]["interface"]]["name"] == "eth0"
    assert await a.eventually_reaches(b)
    with Namespace.open(a.netns) as inside:
        assert inside.run(Path(f"/proc/sys/{SYSCTL.replace('.', '/')}").read_text) == "1\n"
    links = {each["ifname"]: each["flags"] for each in inventory.run_json(a.netns, "ip", "-j", "link")}
    assert "UP" in links["lo"]
    if version != "0.3.1":
        await tool.run("check", a.netns)
    for each in (a, b):
        await tool.run("del", each.netns)
        assert "eth0" not in inventory.devices(each.netns)
    await machine.wait_until_clean()


@pytest.mark.parametrize("plugin", ["bandwidth", "firewall", "portmap"])
async def test_an_unsupported_chain_is_rejected(machine: Machine, cnitool: str, plugin: str) -> None:
    """P-51, P-52, P-54: some of these plugins would succeed without effect."""
    machine.write_list("chained", {"type": "weft-cni"}, {"type": plugin})
    netns = machine.host.make_netns("a")
    refused = await Cnitool(cnitool, "chained").try_("add", netns)
    assert refused.exit_code != 0
    assert f"chained.conflist chains {plugin}" in refused.output
    await machine.wait_until_clean()
    assert (await Cnitool(cnitool).try_("add", netns)).exit_code == 0
