"""A tenant of its own for a test that shares its lab: two networks, groups, policies, and pods on every host."""

from __future__ import annotations

import asyncio
import os

from weft.ctl.netctl.main import run
from weft.lab.hosts import Host, Pod
from weft.lab.netlab import NetLab

# Said with every write: it returns when all nodes have carried it out.
WAIT = "--wait=30"

_NETWORKS = {
    "net": "--subnet 10.1.0.0/16 --subnetv6 2001:db8:1::/64",
    "other": "--subnet 10.2.0.0/16 --subnetv6 2001:db8:2::/64",
}


class TenantFixture:
    """See the module. What is written is written by netctl, as an operator does it."""

    def __init__(self, lab: NetLab, tenant: str) -> None:
        self.lab = lab
        self.tenant = tenant
        # The netmaster that is asked.
        self.url = lab.master.url
        self._births = 0

    async def build(self) -> None:
        """The tenant and its networks."""
        await self.netctl(f"tenant create {self.tenant}")
        for name, subnets in _NETWORKS.items():
            await self.netctl(f"network create {name} -t {self.tenant} --encap {self.lab.netmode} {subnets}")

    async def netctl(self, line: str) -> None:
        """A command that must succeed."""
        words = ["--netmaster", self.url, *line.split()]
        assert await asyncio.to_thread(run, words, environment=os.environ) == 0, line

    async def policy(self, name: str, *rules: str) -> None:
        """A policy whose rules have the numbers 1, 2 and so on."""
        await self.netctl(f"policy create {name} -t {self.tenant}")
        for number, rule in enumerate(rules, start=1):
            await self.rule(name, str(number), rule, wait="")

    async def rule(self, policy: str, number: str, flags: str, *, wait: str = WAIT) -> None:
        """A rule, given as flags of netctl."""
        await self.netctl(f"policy rule-add {policy} {number} -t {self.tenant} {flags} {wait}")

    async def drop_rule(self, policy: str, number: str) -> None:
        await self.netctl(f"policy rule-rm {policy} {number} -t {self.tenant} {WAIT}")

    async def group(self, name: str, *policies: str, network: str = "net") -> None:
        """A group with these policies, or with these from now on."""
        flags = " ".join(f"--policy {policy}" for policy in policies)
        await self.netctl(f"group create {network} {name} -t {self.tenant} {flags} {WAIT}")

    async def pods(self, group: str = "", *, network: str = "net") -> list[Pod]:
        """One on each host."""
        return [await self.pod(host, group, network=network) for host in self.lab.hosts.values()]

    async def pod(self, host: Host, group: str = "", *, network: str = "net") -> Pod:
        """One on a host."""
        self._births += 1
        name = f"{self.tenant}-{group or network}-{host.name}-{self._births}"
        return await host.pod(name, tenant=self.tenant, network=network, group=group)
