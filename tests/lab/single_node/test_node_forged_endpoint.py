"""H3 with packets: a node that writes to etcd directly takes over no address by an endpoint without block or claim."""

from __future__ import annotations

import asyncio
import json

import pytest
from tests.lab.single_node.test_node_diagnostics import request_agent

from weft.adapters.stores.etcd import open_store
from weft.domain import kinds, model
from weft.domain.ids import EndpointId, NetworkName, NodeName, TenantName
from weft.domain.transaction import put
from weft.lab.netlab import open_lab
from weft.lab.waiting import eventually


@pytest.mark.soak
@pytest.mark.parametrize("fwdmode", ["routing", "bridge"])
@pytest.mark.parametrize("subnet", ["10.1.0.0/16", "10.1.0.0/24"], ids=["blocks", "claims"])
async def test_H3_a_forged_endpoint_draws_no_packet(isolated: None, subnet: str, fwdmode: str) -> None:
    async with open_lab(store="etcd", fwdmode=fwdmode) as lab:
        assert lab.etcd is not None
        await lab.network("net", subnet=subnet, gateway="10.1.0.1")
        one, two = await asyncio.gather(lab.host("one"), lab.host("two"))
        client, victim = await one.pod("client", network="net"), await two.pod("victim", network="net")
        assert await client.eventually_reaches(victim)
        forged = model.Endpoint(
            tenant=TenantName("default"),
            network=NetworkName("net"),
            endpoint_id=EndpointId("evil"),
            ip_address=str(victim.address()),
            mac_address="02:02:00:00:00:66",
            host="mallory",
        )
        # No machine has this VTEP: packets that go there are lost.
        mallory = model.Node(name=NodeName("mallory"), vtep_ip="192.0.2.66")
        async with open_store(lab.etcd.endpoints) as store:
            await store.commit([], [put(kinds.NODE, mallory), put(kinds.ENDPOINT, forged)])

        async def ignored() -> list[str]:
            _, body = await request_agent(one, "/inspect/driver")
            return list(json.loads(body)["uncoveredEndpoints"])

        assert await eventually(ignored, bool) == ["default:net:evil"]
        assert await client.reaches(victim, port=7777)
        assert await victim.reaches(client, port=7778)
