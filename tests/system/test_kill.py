"""netmaster on its embedded store is killed at random moments: what it acknowledged is there when it is back."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest

from weft.testing.audit import audit
from weft.testing.masters import MasterProcess, Rest, client, until_told
from weft.testing.waiting import until

SUBNETS = {"small": "10.1.0.0/24", "large": "10.2.0.0/16"}
FEW = 12
"""About so many endpoints a worker has, so that the same addresses go round."""

Endpoint = tuple[str, str]


class Workers:
    """Clients that create and delete endpoints of their own, send again what nobody answered, and remember what they
    were told."""

    def __init__(self, rest: Rest, chance: random.Random) -> None:
        self.told: dict[Endpoint, str] = {}
        self.answered = 0
        self._rest = rest
        self._chance = chance
        self._resting = False

    async def work(self, name: str) -> None:
        """Go on until told to rest, then finish what is under way."""
        while not self._resting:
            own = [endpoint for endpoint in self.told if endpoint[1].startswith(name)]
            if self._chance.random() < len(own) / FEW:
                await self._delete(self._chance.choice(own))
            else:
                await self._create(self._chance.choice(list(SUBNETS)), f"{name}-{self._chance.getrandbits(48)}")
            self.answered += 1

    async def disturbed_by(self, disturb: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Work, be disturbed at a random moment, and come to rest after that."""
        self._resting = False
        goal = self.answered + self._chance.randint(1, 40)
        async with asyncio.TaskGroup() as tasks:
            for name in "abcd":
                tasks.create_task(self.work(name))
            await until(lambda: self.answered >= goal)
            await asyncio.sleep(self._chance.uniform(0, 0.02))
            await disturb()
            self._resting = True

    async def _create(self, network: str, name: str) -> None:
        made = (await until_told(lambda: self._rest.create_endpoint(name, network=network))).accepted()
        self.told[network, name] = made["EndpointConfig"]["ipAddress"]

    async def _delete(self, endpoint: Endpoint) -> None:
        network, name = endpoint
        answer = await until_told(lambda: self._rest.delete_endpoint(name, network=network))
        if answer.status != 404:  # an earlier try may have deleted it, and died before it could say so
            answer.accepted()
        del self.told[endpoint]


async def stored_endpoints(rest: Rest) -> dict[Endpoint, str]:
    """The address of each endpoint, in a state in which the auditor finds no fault."""
    state = await rest.state()
    assert audit({key: msgspec.json.encode(document) for key, document in state.items()}) == []
    documents = [document["o"] for key, document in state.items() if key.startswith("endpoints/")]
    return {(each["networkName"], each["endpointID"]): each["ipAddress"] for each in documents}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kills", [15, pytest.param(200, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])])
async def test_what_was_acknowledged_survives_kills(tmp_path: Path, kills: int) -> None:
    """No endpoint is lost, doubled, half there or back from the dead, whatever moment the process dies at."""
    async with (
        MasterProcess(tmp_path, "--default-subnet", "none") as master,
        client(master.url) as rest,
    ):
        for name, subnet in SUBNETS.items():
            network = {"tenantName": "default", "networkName": name, "encap": "vxlan", "subnet": subnet}
            (await rest.put("networks", **network)).accepted()
        workers = Workers(rest, random.Random())

        async def kill_and_start() -> None:
            master.kill()
            await master.start()

        for _ in range(kills):
            await workers.disturbed_by(kill_and_start)
            assert await stored_endpoints(rest) == workers.told
