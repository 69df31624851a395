"""cnitool 1.3, the reference caller, attaches namespaces; and Debian's own plugins stand beside ours in a chain."""

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
    """A namespace, and what ADD answered."""

    netns: Path
    result: Any

    @property
    def address(self) -> traffic.IPAddress:
        """Its address on our network: a chain may tell others before."""
        return ip_interface(self.result["ips"][-1]["address"]).ip

    async def reaches(self, other: Attached) -> bool:
        with Namespace.open(self.netns) as here, Namespace.open(other.netns) as there:
            places = traffic.Place(here, self.address), traffic.Place(there, other.address)
            return await traffic.reaches(*places, port=80)


class Cnitool(NamedTuple):
    """The program on a network, as a person runs it."""

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
    """C-090 to C-097: GC without a list takes off only what cnitool itself remembers."""
    tool = Cnitool(cnitool)
    netns = [machine.host.make_netns(name) for name in ("a", "b")]
    await tool.run("status", netns[0])
    a, b = [await tool.add(each) for each in netns]
    assert {str(a.address), str(b.address)} == await machine.held()
    assert await a.reaches(b)
    assert await b.reaches(a)
    assert "attached already" in (await tool.try_("add", a.netns)).output
    await tool.run("check", a.netns)
    for _ in range(2):
        await tool.run("del", a.netns)
    assert "eth0" not in inventory.devices(a.netns)
    assert (await tool.try_("check", a.netns)).exit_code != 0
    await tool.run("gc", b.netns)
    assert "eth0" not in inventory.devices(b.netns)
    await machine.nothing_left()


async def test_what_is_asked_for_is_given_and_told(machine: Machine, cnitool: str) -> None:
    """P-10, P-11, P-45: address, hardware address and DNS of `runtimeConfig`."""
    tool = Cnitool(cnitool)
    a = await tool.add(machine.host.make_netns("a"), CAP_ARGS=json.dumps(ASKED))
    assert str(a.address) == "10.224.3.7"
    assert a.result["dns"] == {"nameservers": ["10.224.0.53"], "search": ["blue.example"], "options": ["ndots:3"]}
    (link,) = (each for each in inventory.ask(a.netns, "ip", "-j", "link") if each["ifname"] == "eth0")
    assert link["address"] == "02:11:22:33:44:55"
    b = await tool.add(machine.host.make_netns("b"))
    assert await b.reaches(a)
    for each in (a, b):
        await tool.run("del", each.netns)
    await machine.nothing_left()


async def test_ports_of_the_host_and_rates(machine: Machine, cnitool: str) -> None:
    """P-51, P-52: a port that is taken is refused by name, and is free again after DEL."""
    machine.write_list("declared", {"type": "weft-cni", "capabilities": {"portMappings": True, "bandwidth": True}})
    tool = Cnitool(cnitool, "declared")
    asked = {
        "portMappings": [{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}],
        "bandwidth": {"ingressRate": 1_000_000, "ingressBurst": 1_000_000},
    }
    a = await tool.add(machine.host.make_netns("a"), CAP_ARGS=json.dumps(asked))
    b = machine.host.make_netns("b")
    refused = await tool.try_("add", b, CAP_ARGS=json.dumps(asked))
    assert refused.exit_code != 0
    assert "tcp/8080" in refused.output
    await tool.run("del", a.netns)
    await tool.add(b, CAP_ARGS=json.dumps(asked))
    await tool.run("del", b)
    await machine.nothing_left()


@pytest.mark.parametrize("version", ["0.3.1", "0.4.0", "1.0.0"])
async def test_a_chain_of_loopback_us_and_tuning(machine: Machine, cnitool: str, version: str) -> None:
    """P-50, P-53: each plugin gets the result before it, also in CHECK and DEL."""
    machine.write_list("chained", {"type": "loopback"}, {"type": "weft-cni"}, TUNING, version=version)
    tool = Cnitool(cnitool, "chained")
    a, b = [await tool.add(machine.host.make_netns(name)) for name in ("a", "b")]
    assert a.result["interfaces"][0]["name"] == "lo"
    assert a.result["interfaces"][a.result["ips"][-1]["interface"]]["name"] == "eth0"
    assert await a.reaches(b)
    with Namespace.open(a.netns) as inside:
        assert inside.run(Path(f"/proc/sys/{SYSCTL.replace('.', '/')}").read_text) == "1\n"
    links = {each["ifname"]: each["flags"] for each in inventory.ask(a.netns, "ip", "-j", "link")}
    assert "UP" in links["lo"]
    if version != "0.3.1":
        await tool.run("check", a.netns)
    for each in (a, b):
        await tool.run("del", each.netns)
        assert "eth0" not in inventory.devices(each.netns)
    await machine.nothing_left()


@pytest.mark.parametrize("plugin", ["bandwidth", "firewall", "portmap"])
async def test_a_chain_that_cannot_work_is_refused(machine: Machine, cnitool: str, plugin: str) -> None:
    """P-51, P-52, P-54: some of them would succeed and do nothing."""
    machine.write_list("chained", {"type": "weft-cni"}, {"type": plugin})
    netns = machine.host.make_netns("a")
    refused = await Cnitool(cnitool, "chained").try_("add", netns)
    assert refused.exit_code != 0
    assert f"chained.conflist chains {plugin}" in refused.output
    await machine.nothing_left()
    assert (await Cnitool(cnitool).try_("add", netns)).exit_code == 0
