"""A separate tenant for each test in a shared lab: two networks, groups, policies, and pods on every host."""

from __future__ import annotations

import asyncio
import os

from weft.ctl.netctl.main import run
from weft.lab.hosts import Host, Pod
from weft.lab.netlab import NetLab

# With every write: return when all nodes have applied it.
WAIT = "--wait=30"

_NETWORKS = {
    "net": "--subnet 10.1.0.0/16 --subnetv6 2001:db8:1::/64",
    "other": "--subnet 10.2.0.0/16 --subnetv6 2001:db8:2::/64",
}


class TenantFixture:
    """A tenant of a shared lab. All objects are written with netctl, as an operator does."""

    def __init__(self, lab: NetLab, tenant: str) -> None:
        self.lab = lab
        self.tenant = tenant
        # The netmaster that netctl uses.
        self.url = lab.master.url
        self._births = 0

    async def build(self) -> None:
        """Create the tenant and its networks."""
        await self.netctl(f"tenant create {self.tenant}")
        for name, subnets in _NETWORKS.items():
            await self.netctl(f"network create {name} -t {self.tenant} --encap {self.lab.netmode} {subnets}")

    async def netctl(self, line: str) -> None:
        """Run netctl, which must succeed."""
        words = ["--netmaster", self.url, *line.split()]
        assert await asyncio.to_thread(run, words, environment=os.environ) == 0, line

    async def policy(self, name: str, *rules: str) -> None:
        """Create a policy with rules that are numbered from 1."""
        await self.netctl(f"policy create {name} -t {self.tenant}")
        for number, rule in enumerate(rules, start=1):
            await self.rule(name, str(number), rule, wait="")

    async def rule(self, policy: str, number: str, flags: str, *, wait: str = WAIT) -> None:
        """Create a rule from netctl flags."""
        await self.netctl(f"policy rule-add {policy} {number} -t {self.tenant} {flags} {wait}")

    async def drop_rule(self, policy: str, number: str) -> None:
        await self.netctl(f"policy rule-rm {policy} {number} -t {self.tenant} {WAIT}")

    async def group(self, name: str, *policies: str, network: str = "net") -> None:
        """Create or update a group with these policies, also if that opens traffic."""
        flags = " ".join(f"--policy {policy}" for policy in policies) or "--no-policy"
        await self.netctl(f"group create {network} {name} -t {self.tenant} {flags} --force {WAIT}")

    async def pods(self, group: str = "", *, network: str = "net") -> list[Pod]:
        """Create a pod on each host."""
        return [await self.pod(host, group, network=network) for host in self.lab.hosts.values()]

    async def pod(self, host: Host, group: str = "", *, network: str = "net") -> Pod:
        """Create a pod on a host."""
        self._births += 1
        name = f"{self.tenant}-{group or network}-{host.name}-{self._births}"
        return await host.pod(name, tenant=self.tenant, network=network, group=group)
