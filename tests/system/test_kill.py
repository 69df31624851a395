"""netmaster on its embedded store is killed at random moments: acknowledged writes survive."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.support.address_audit import audit

from weft.lab.servers.masters import MasterProcess, Rest, client, retry_until_answered
from weft.lab.waiting import until

SUBNETS = {
    "small": {"subnet": "10.1.0.0/24", "ipv6Subnet": "fd01::/120"},
    "large": {"subnet": "10.2.0.0/16", "ipv6Subnet": "fd02::/64"},
}
# About so many endpoints a worker has, so that the same addresses go round.
FEW = 12
# The same of services, which are made every now and then.
FEWER = 4

Endpoint = tuple[str, str]
Addresses = tuple[str, str]


class Workers:
    """Clients that create and delete endpoints and services of their own, retry unanswered requests, and record the
    responses."""

    def __init__(self, rest: Rest, chance: random.Random) -> None:
        self.acknowledged: dict[Endpoint, str] = {}
        # By name, in which network.
        self.services: dict[str, str] = {}
        self.answered = 0
        self._rest = rest
        self._chance = chance
        self._resting = False

    async def work(self, name: str) -> None:
        """Work until stopped, then finish the current operation."""
        while not self._resting:
            own = [endpoint for endpoint in self.acknowledged if endpoint[1].startswith(name)]
            if self._chance.random() < 0.25:
                await self._keep_shop(name)
            elif self._chance.random() < len(own) / FEW:
                await self._delete(self._chance.choice(own))
            else:
                await self._create(self._chance.choice(list(SUBNETS)), f"{name}-{self._chance.getrandbits(48)}")
            self.answered += 1

    async def interrupted_by(self, interrupt: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Work, get interrupted at a random moment, then finish."""
        self._resting = False
        goal = self.answered + self._chance.randint(1, 40)
        async with asyncio.TaskGroup() as tasks:
            for name in "abcd":
                tasks.create_task(self.work(name))
            await until(lambda: self.answered >= goal)
            await asyncio.sleep(self._chance.uniform(0, 0.02))
            await interrupt()
            self._resting = True

    async def _create(self, network: str, name: str) -> None:
        made = (await retry_until_answered(lambda: self._rest.create_endpoint(name, network=network))).accepted()
        self.acknowledged[network, name] = made["EndpointConfig"]["ipAddress"]

    async def _delete(self, endpoint: Endpoint) -> None:
        network, name = endpoint
        answer = await retry_until_answered(lambda: self._rest.delete_endpoint(name, network=network))
        if answer.status != 404:  # an earlier try may have deleted it, and died before it could say so
            answer.accepted()
        del self.acknowledged[endpoint]

    async def _keep_shop(self, name: str) -> None:
        """A service is made, is changed, or goes."""
        own = [service for service in self.services if service.startswith(name)]
        if own and self._chance.random() < len(own) / FEWER:
            service = self._chance.choice(own)
            answer = await retry_until_answered(lambda: self._rest.delete("serviceLBs", f"default:{service}"))
            if answer.status != 404:
                answer.accepted()
            del self.services[service]
            return
        changing = bool(own) and self._chance.random() < 0.5
        service = self._chance.choice(own) if changing else f"{name}-{self._chance.getrandbits(48)}"
        network = self.services.get(service) or self._chance.choice(list(SUBNETS))
        wanted: dict[str, object] = {"tenantName": "default", "serviceName": service, "networkName": network}
        wanted |= {"selectors": ["app=web"], "ports": [f"{self._chance.randint(1, 9999)}:80:TCP"]}
        (await retry_until_answered(lambda: self._rest.put("serviceLBs", **wanted))).accepted()
        self.services[service] = network


async def audited(rest: Rest) -> dict[str, Any]:
    """The state, in which the auditor finds no fault."""
    state = await rest.state()
    assert audit({key: msgspec.json.encode(document) for key, document in state.items()}) == []
    return state


def stored_endpoints(state: dict[str, Any]) -> dict[Endpoint, str]:
    """The address of each endpoint."""
    documents = [document["o"] for key, document in state.items() if key.startswith("endpoints/")]
    return {(each["networkName"], each["endpointID"]): each["ipAddress"] for each in documents}


def stored_services(state: dict[str, Any]) -> dict[str, Addresses]:
    """The addresses of each service."""
    documents = [document["o"] for key, document in state.items() if key.startswith("services/")]
    return {each["serviceName"]: (each["vip"], each["ipv6Vip"]) for each in documents}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kills", [15, pytest.param(200, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])])
async def test_acknowledged_writes_survive_kills(tmp_path: Path, kills: int) -> None:
    """No endpoint or service is lost, doubled, half there or back from the dead, whatever moment the process dies at,
    and a service keeps its addresses through every change."""
    async with (
        MasterProcess(tmp_path, "--default-subnet", "none") as master,
        client(master.url) as rest,
    ):
        for name, subnets in SUBNETS.items():
            network = {"tenantName": "default", "networkName": name, "encap": "vxlan", **subnets}
            (await rest.put("networks", **network)).accepted()
        workers = Workers(rest, random.Random())

        async def kill_and_start() -> None:
            master.kill()
            await master.start()

        before: dict[str, Addresses] = {}
        for _ in range(kills):
            await workers.interrupted_by(kill_and_start)
            state = await audited(rest)
            assert stored_endpoints(state) == workers.acknowledged
            services = stored_services(state)
            assert services.keys() == workers.services.keys()
            assert all(before[name] == services[name] for name in before.keys() & services.keys())
            before = services
