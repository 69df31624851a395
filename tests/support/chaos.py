"""Pod churn while agents, shims, netmaster and the store are killed; afterwards nothing is lost or doubled.

`python -m tests.support.chaos --kills 100`, as root; with `--datapath ovs` the daemons of Open vSwitch are killed too.
It fails if an address was allocated twice, or if kernel, rules, attachment logs, store and the ADD results do not agree
in the end.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress

from tests.support import inventory
from tests.support.inventory import Held
from tests.support.policy_rules import assert_rules_enforced, group_of, write_rules

from weft.cni.errors import CniError
from weft.lab.hosts import Host, Pod
from weft.lab.namespaces import enter_private_namespaces
from weft.lab.netlab import NetLab, open_lab
from weft.lab.servers.openvswitch import Switch
from weft.lab.waiting import DEADLINE, until
from weft.runtime.backoff import Backoff, wait_event
from weft.runtime.tasks import background

# Concurrent pods per host, in each of two networks.
SLOTS = 4
_TENANT = "default"
_NETWORKS = ("default-net", "small")


class Slot:
    """Attaches and detaches one pod at a time; its shim may be killed."""

    def __init__(self, chaos: ChaosRun, host: Host, name: str, network: str, group: str) -> None:
        self.host = host
        self.calling: asyncio.Task[object] | None = None
        self.pod: Pod | None = None
        self._chaos = chaos
        self._name = name
        self._network = network
        self._group = group

    async def run(self) -> None:
        """Attach and detach until the run is over; the last pod stays attached."""
        while not self._chaos.over:
            try:
                self.pod = await self._call(lambda: self.host.pod(self._name, network=self._network, group=self._group))
            except (CniError, asyncio.CancelledError, OSError):
                self._chaos.results["ADD without an answer"] += 1
                await self._detach()
                continue
            self._chaos.results["ADD"] += 1
            self._chaos.record_add(self._held(self.pod))
            if not self._chaos.over:
                await self.remove()

    async def remove(self) -> None:
        """Detach the pod, if any."""
        if self.pod is not None:
            self._chaos.record_del(self._held(self.pod))
        await self._detach()

    async def _detach(self) -> None:
        """Retry DEL until it succeeds, as runtimes do, and create a new namespace for the next pod."""
        self.pod = None
        attachment = self.host.attachment(self._name)
        backoff = Backoff(cap=0.5, within=2 * DEADLINE)
        while True:
            try:
                await self._call(lambda: self.host.cni.delete(self.host.network, attachment))
            except (CniError, asyncio.CancelledError, OSError):
                await backoff.pause()
            else:
                break
        self._chaos.results["DEL"] += 1
        self.host.remove_netns(self._name)

    async def _call(self, call: Callable[[], Awaitable[Pod | None]]) -> Pod | None:
        """Call the plugin; cancellation stands for a killed shim."""
        self.calling = asyncio.ensure_future(call())
        try:
            return await asyncio.shield(self.calling)
        finally:
            self.calling = None

    def _held(self, pod: Pod | None) -> set[Held]:
        assert pod is not None
        return {Held(_TENANT, str(each.address.ip), self.host.name) for each in pod.result.addresses}


class Witness:
    """Polls the kernels without our own code: no address may have anti-spoofing entries on two ports.

    Hosts are read one after the other, so an address that moves in between is seen on both. That cannot happen
    twice in a row: a released address has a cooldown.
    """

    def __init__(self, lab: NetLab) -> None:
        self.readings = 0
        # Held while the kernels and switches are read.
        self.turn = asyncio.Lock()
        self._lab = lab
        self._suspects: set[tuple[str, str]] = set()

    async def run(self) -> None:
        """Poll until the run is over."""
        while True:
            async with self.turn:
                doubled = await asyncio.to_thread(self._doubled)
            assert not doubled & self._suspects, f"allowed on two ports: {doubled & self._suspects}"
            self._suspects = doubled
            self.readings += 1

    def _doubled(self) -> set[tuple[str, str]]:
        spoken: Counter[tuple[str, str]] = Counter()
        for host in self._lab.hosts.values():
            with suppress(FileNotFoundError):  # the tenant netns was deleted with its last pod
                spoken.update((held.tenant, held.address) for held in inventory.spoofguard_addresses(host))
        return {address for address, ports in spoken.items() if ports > 1}


class ChaosRun:
    """A lab under chaos, and the ADD results of its runtimes."""

    def __init__(self, lab: NetLab, *, dice: random.Random, rules: int) -> None:
        self.lab = lab
        self.witness = Witness(lab)
        self.rules = rules
        self.dice = dice
        self.over = False
        self.results: Counter[str] = Counter()
        self.killed: Counter[str] = Counter()
        # Kills during an operation.
        self.inside = 0
        self.attached: set[Held] = set()
        self.slots = [
            Slot(self, host, f"{host.name}-{network}-{number}", network, group_of(network) if rules else "")
            for host in lab.hosts.values()
            for network in _NETWORKS
            for number in range(SLOTS)
        ]

    def record_add(self, held: set[Held]) -> None:
        """Record the addresses of an ADD result."""
        taken = {each.address for each in held}
        others = {each for each in self.attached if each.address in taken}
        assert not others, f"{held} was allocated already: {others}"
        self.attached |= held

    def record_del(self, held: set[Held]) -> None:
        self.attached -= held

    async def kill_one(self) -> None:
        """Kill a process, during an operation if one starts soon, and restart it."""
        victims = {"shim": 4, "agent": 3, "master": 1} | ({"store": 1} if self.lab.etcd else {})
        victims |= {"switch": 1, "switch's database": 1} if self.lab.datapath == "ovs" else {}
        victim = self.dice.choices(list(victims), weights=list(victims.values()))[0]
        host = self.dice.choice(list(self.lab.hosts.values()))
        await until(lambda: any(slot.calling for slot in self.slots if slot.host is host))
        await wait_event(asyncio.Event(), within=self.dice.uniform(0, 0.01))  # a random point of the operation
        busy = [slot.calling for slot in self.slots if slot.host is host and slot.calling]
        if victim == "shim" and not busy:
            return
        self.killed[victim] += 1
        self.inside += bool(busy)
        if victim == "shim":
            self.dice.choice(busy).cancel()
        elif victim == "agent":
            host.kill()
            await host.start()
        elif victim == "master":
            await self.lab.master.start()
        elif victim == "store" and self.lab.etcd is not None:
            await self.lab.etcd.restart()
        elif host.switch is not None:
            async with self.witness.turn:
                await asyncio.to_thread(_restart, host.switch, victim)

    async def verify(self) -> None:
        """Assert that all state agrees, read without our own code, with pods attached and then without."""
        await inventory.wait_consistent(self.lab)
        stored = inventory.stored(await self.lab.rest.state())
        assert stored == self.attached, (
            f"attached but not stored {self.attached - stored}, the reverse {stored - self.attached}"
        )
        if self.rules:
            await assert_rules_enforced([slot.pod for slot in self.slots if slot.pod is not None], rules=self.rules)
        for slot in self.slots:
            if slot.pod is not None:
                await slot.pod.check()
            await slot.remove()
        await inventory.wait_consistent(self.lab)
        assert inventory.stored(await self.lab.rest.state()) == set()


def _restart(switch: Switch, daemon: str) -> None:
    """Kill one of its daemons, and return when it is running again."""
    if daemon == "switch":
        switch.kill_daemon()
        switch.start_daemon()
    else:
        switch.kill_database()
        switch.start_database()


async def run_chaos(*, kills: int, store: str, datapath: str, seed: int, rules: int = 0) -> None:
    """Run chaos with this number of kills and rules."""
    async with open_lab(store=store, datapath=datapath) as lab:
        try:
            await lab.network("small", subnet="10.9.0.0/24", ipv6Subnet="2001:db8:9::/64")
            if rules:
                await write_rules(lab, rules=rules, networks=_NETWORKS)
            await asyncio.gather(lab.host("one"), lab.host("two"))
            chaos = ChaosRun(lab, dice=random.Random(seed), rules=rules)
            async with background(chaos.witness.run(), name="witness"), asyncio.TaskGroup() as running:
                for slot in chaos.slots:
                    running.create_task(slot.run())
                try:
                    while chaos.killed.total() < kills:
                        await chaos.kill_one()
                finally:
                    chaos.over = True  # also on errors: slots treat cancellation as a killed shim
            await chaos.verify()
            sys.stdout.write(
                f"killed {dict(chaos.killed)}, {chaos.inside} inside an operation; {dict(chaos.results)};"
                f" the kernels were read {chaos.witness.readings} times\n"
            )
            assert chaos.inside * 2 >= kills
        except BaseException:
            lab.print_logs()
            raise


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.chaos")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--store", choices=("embedded", "etcd"), default="etcd")
    parser.add_argument("--datapath", choices=("linux", "ovs"), default="linux")
    parser.add_argument("--rules", type=int, default=0, help="number of enforced rules")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    args = parser.parse_args()
    sys.stdout.write(f"seed {args.seed}\n")
    enter_private_namespaces()
    asyncio.run(run_chaos(kills=args.kills, store=args.store, datapath=args.datapath, seed=args.seed, rules=args.rules))


if __name__ == "__main__":
    main()
