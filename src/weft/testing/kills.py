"""Pods come and go while agents, shims, netmaster and the store are killed -9; afterwards nothing is lost or doubled.

`python -m weft.testing.kills --kills 100`, as root. It ends with an error when an address was given twice, or when
kernel, rules, ledgers, store and what runtimes were told do not agree in the end.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from collections import Counter
from collections.abc import Awaitable, Callable

from weft.cni.errors import CniError
from weft.runtime.backoff import Backoff, happens
from weft.testing import inventory
from weft.testing.apart import step_apart
from weft.testing.hosts import Host, Pod
from weft.testing.inventory import Held
from weft.testing.netlab import NetLab, open_lab
from weft.testing.waiting import DEADLINE, until

SLOTS = 4
"""Pods that come and go on each host, in each of two networks."""
_TENANT = "default"


class Slot:
    """A place for one pod at a time, at the hands of a runtime that may be killed itself."""

    def __init__(self, siege: Siege, host: Host, name: str, network: str) -> None:
        self.host = host
        self.calling: asyncio.Task[object] | None = None
        self.pod: Pod | None = None
        self._siege = siege
        self._name = name
        self._network = network

    async def run(self) -> None:
        """Attach and detach until the siege is over; what is attached last stays so."""
        while not self._siege.over:
            try:
                self.pod = await self._call(lambda: self.host.pod(self._name, network=self._network))
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

    def _held(self, pod: Pod | None) -> Held:
        assert pod is not None
        return Held(_TENANT, str(pod.address()), self.host.name)


class Siege:
    """A lab under attack, and what its runtimes were told."""

    def __init__(self, lab: NetLab, *, dice: random.Random) -> None:
        self.lab = lab
        self.dice = dice
        self.over = False
        self.outcomes: Counter[str] = Counter()
        self.killed: Counter[str] = Counter()
        self.inside = 0
        """Kills in the middle of an operation."""
        self.told: set[Held] = set()
        self.slots = [
            Slot(self, host, f"{host.name}-{network}-{number}", network)
            for host in lab.hosts.values()
            for network in ("default-net", "small")
            for number in range(SLOTS)
        ]

    def take(self, held: Held) -> None:
        """A runtime was told that its pod has this address."""
        others = {each for each in self.told if each.address == held.address}
        assert not others, f"{held} was given already: {others}"
        self.told.add(held)

    def give_back(self, held: Held) -> None:
        self.told.remove(held)

    async def kill_one(self) -> None:
        """Kill something, in the middle of an operation if one comes soon, and start it again."""
        victims = {"shim": 4, "agent": 3, "master": 1} | ({"store": 1} if self.lab.etcd else {})
        victim = self.dice.choices(list(victims), weights=list(victims.values()))[0]
        host = self.dice.choice(list(self.lab.hosts.values()))
        await until(lambda: any(slot.calling for slot in self.slots if slot.host is host))
        await happens(asyncio.Event(), within=self.dice.uniform(0, 0.01))  # somewhere in the middle of it
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
        elif self.lab.etcd is not None:
            await self.lab.etcd.restart()

    async def judge(self) -> None:
        """Everything agrees, by an independent reader, with pods attached and then without."""
        await inventory.settled(self.lab)
        stored = inventory.stored(await self.lab.rest.state())
        assert stored == self.told, f"told but not stored {self.told - stored}, the reverse {stored - self.told}"
        for slot in self.slots:
            if slot.pod is not None:
                await slot.pod.check()
            await slot.remove()
        await inventory.settled(self.lab)
        assert inventory.stored(await self.lab.rest.state()) == set()


async def besiege(*, kills: int, store: str, seed: int) -> None:
    """The whole siege."""
    async with open_lab(store=store) as lab:
        try:
            await lab.network("small", subnet="10.9.0.0/24")
            await asyncio.gather(lab.host("one"), lab.host("two"))
            siege = Siege(lab, dice=random.Random(seed))
            async with asyncio.TaskGroup() as running:
                for slot in siege.slots:
                    running.create_task(slot.run())
                while siege.killed.total() < kills:
                    await siege.kill_one()
                siege.over = True
            await siege.judge()
            sys.stdout.write(
                f"killed {dict(siege.killed)}, {siege.inside} inside an operation; {dict(siege.outcomes)}\n"
            )
            assert siege.inside * 2 >= kills
        except BaseException:
            lab.tell_logs()
            raise


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m weft.testing.kills")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--store", choices=("embedded", "etcd"), default="etcd")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    args = parser.parse_args()
    sys.stdout.write(f"seed {args.seed}\n")
    step_apart()
    asyncio.run(besiege(kills=args.kills, store=args.store, seed=args.seed))


if __name__ == "__main__":
    main()
