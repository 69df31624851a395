"""Pods come and go while agents, shims, netmaster and the store are killed -9; afterwards nothing is lost or doubled.

`python -m tests.support.chaos --kills 100`, as root; with `--datapath ovs` the daemons of Open vSwitch are killed too.
It ends with an error when an address was given twice, or when kernel, rules, ledgers, store and what runtimes were told
do not agree in the end.
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
from tests.support.rulebooks import group_of, rules_hold, write_rules

from weft.cni.errors import CniError
from weft.lab.hosts import Host, Pod
from weft.lab.namespaces import step_apart
from weft.lab.netlab import NetLab, open_lab
from weft.lab.servers.openvswitch import Switch
from weft.lab.waiting import DEADLINE, until
from weft.runtime.backoff import Backoff, wait_event
from weft.runtime.tasks import background

# Pods that come and go on each host, in each of two networks.
SLOTS = 4
_TENANT = "default"
_NETWORKS = ("default-net", "small")


class Slot:
    """A place for one pod at a time, at the hands of a runtime that may be killed itself."""

    def __init__(self, siege: Siege, host: Host, name: str, network: str, group: str) -> None:
        self.host = host
        self.calling: asyncio.Task[object] | None = None
        self.pod: Pod | None = None
        self._siege = siege
        self._name = name
        self._network = network
        self._group = group

    async def run(self) -> None:
        """Attach and detach until the siege is over; what is attached last stays so."""
        while not self._siege.over:
            try:
                self.pod = await self._call(lambda: self.host.pod(self._name, network=self._network, group=self._group))
            except (CniError, asyncio.CancelledError, OSError):
                self._siege.outcomes["ADD without an answer"] += 1
                await self._detach()
                continue
            self._siege.outcomes["ADD"] += 1
            self._siege.take(self._held(self.pod))
            if not self._siege.over:
                await self.remove()

    async def remove(self) -> None:
        """Nothing is attached any more."""
        if self.pod is not None:
            self._siege.give_back(self._held(self.pod))
        await self._detach()

    async def _detach(self) -> None:
        """DEL as often as it takes, as runtimes do it, and a fresh namespace for the next pod."""
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
        self._siege.outcomes["DEL"] += 1
        self.host.remove_netns(self._name)

    async def _call(self, call: Callable[[], Awaitable[Pod | None]]) -> Pod | None:
        """A call of the plugin, which whoever wants to kill the shim may cancel."""
        self.calling = asyncio.ensure_future(call())
        try:
            return await asyncio.shield(self.calling)
        finally:
            self.calling = None

    def _held(self, pod: Pod | None) -> set[Held]:
        assert pod is not None
        return {Held(_TENANT, str(each.address.ip), self.host.name) for each in pod.result.addresses}


class Witness:
    """Reads the kernels again and again, without our own code: no address may be spoken for by two ports.

    Hosts are read one after the other, so what goes from one to the next in between is seen at both. Twice in a row
    that cannot be: a released address rests.
    """

    def __init__(self, lab: NetLab) -> None:
        self.readings = 0
        # Held while the kernels, and the switches, are being read.
        self.turn = asyncio.Lock()
        self._lab = lab
        self._suspects: set[tuple[str, str]] = set()

    async def run(self) -> None:
        """Look for as long as the siege goes on."""
        while True:
            async with self.turn:
                doubled = await asyncio.to_thread(self._doubled)
            assert not doubled & self._suspects, f"spoken for by two ports: {doubled & self._suspects}"
            self._suspects = doubled
            self.readings += 1

    def _doubled(self) -> set[tuple[str, str]]:
        spoken: Counter[tuple[str, str]] = Counter()
        for host in self._lab.hosts.values():
            with suppress(FileNotFoundError):  # the tenant's last pod has just left, and its namespace with it
                spoken.update((held.tenant, held.address) for held in inventory.allowed_to_speak(host))
        return {address for address, ports in spoken.items() if ports > 1}


class Siege:
    """A lab under attack, and what its runtimes were told."""

    def __init__(self, lab: NetLab, *, dice: random.Random, rules: int) -> None:
        self.lab = lab
        self.witness = Witness(lab)
        self.rules = rules
        self.dice = dice
        self.over = False
        self.outcomes: Counter[str] = Counter()
        self.killed: Counter[str] = Counter()
        # Kills in the middle of an operation.
        self.inside = 0
        self.told: set[Held] = set()
        self.slots = [
            Slot(self, host, f"{host.name}-{network}-{number}", network, group_of(network) if rules else "")
            for host in lab.hosts.values()
            for network in _NETWORKS
            for number in range(SLOTS)
        ]

    def take(self, held: set[Held]) -> None:
        """A runtime was told that its pod has these addresses."""
        taken = {each.address for each in held}
        others = {each for each in self.told if each.address in taken}
        assert not others, f"{held} was given already: {others}"
        self.told |= held

    def give_back(self, held: set[Held]) -> None:
        self.told -= held

    async def kill_one(self) -> None:
        """Kill something, in the middle of an operation if one comes soon, and start it again."""
        victims = {"shim": 4, "agent": 3, "master": 1} | ({"store": 1} if self.lab.etcd else {})
        victims |= {"switch": 1, "switch's database": 1} if self.lab.datapath == "ovs" else {}
        victim = self.dice.choices(list(victims), weights=list(victims.values()))[0]
        host = self.dice.choice(list(self.lab.hosts.values()))
        await until(lambda: any(slot.calling for slot in self.slots if slot.host is host))
        await wait_event(asyncio.Event(), within=self.dice.uniform(0, 0.01))  # somewhere in the middle of it
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

    async def judge(self) -> None:
        """Everything agrees, by an independent reader, with pods attached and then without."""
        await inventory.settled(self.lab)
        stored = inventory.stored(await self.lab.rest.state())
        assert stored == self.told, f"told but not stored {self.told - stored}, the reverse {stored - self.told}"
        if self.rules:
            await rules_hold([slot.pod for slot in self.slots if slot.pod is not None], rules=self.rules)
        for slot in self.slots:
            if slot.pod is not None:
                await slot.pod.check()
            await slot.remove()
        await inventory.settled(self.lab)
        assert inventory.stored(await self.lab.rest.state()) == set()


def _restart(switch: Switch, daemon: str) -> None:
    """Kill one of its daemons, and return when it answers again."""
    if daemon == "switch":
        switch.kill_daemon()
        switch.start_daemon()
    else:
        switch.kill_database()
        switch.start_database()


async def besiege(*, kills: int, store: str, datapath: str, seed: int, rules: int = 0) -> None:
    """The whole siege, with so many rules in force."""
    async with open_lab(store=store, datapath=datapath) as lab:
        try:
            await lab.network("small", subnet="10.9.0.0/24", ipv6Subnet="2001:db8:9::/64")
            if rules:
                await write_rules(lab, rules=rules, networks=_NETWORKS)
            await asyncio.gather(lab.host("one"), lab.host("two"))
            siege = Siege(lab, dice=random.Random(seed), rules=rules)
            async with background(siege.witness.run(), name="witness"), asyncio.TaskGroup() as running:
                for slot in siege.slots:
                    running.create_task(slot.run())
                try:
                    while siege.killed.total() < kills:
                        await siege.kill_one()
                finally:
                    siege.over = True  # also when something is wrong: slots take a cancellation for a killed shim
            await siege.judge()
            sys.stdout.write(
                f"killed {dict(siege.killed)}, {siege.inside} inside an operation; {dict(siege.outcomes)};"
                f" the kernels were read {siege.witness.readings} times\n"
            )
            assert siege.inside * 2 >= kills
        except BaseException:
            lab.tell_logs()
            raise


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.chaos")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--store", choices=("embedded", "etcd"), default="etcd")
    parser.add_argument("--datapath", choices=("linux", "ovs"), default="linux")
    parser.add_argument("--rules", type=int, default=0, help="how many rules are in force")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    args = parser.parse_args()
    sys.stdout.write(f"seed {args.seed}\n")
    step_apart()
    asyncio.run(besiege(kills=args.kills, store=args.store, datapath=args.datapath, seed=args.seed, rules=args.rules))


if __name__ == "__main__":
    main()
