"""Node ports on chosen addresses of a host only (CVE-2020-8558, CVE-2021-25736)."""

from __future__ import annotations

from contextlib import ExitStack

from tests.support import inventory
from tests.support.external_hosts import NODE_PORT, VIPS, give_v6, names, places, the_world
from tests.support.kube_feed import TARGET_PORT, kube_feed
from tests.support.responders import answering, ask, is_ignored, is_refused

from weft.lab.netlab import open_lab


async def test_node_ports_are_those_of_chosen_addresses() -> None:
    """Other addresses of the host, and the family that is not named, have none."""
    async with open_lab(store="etcd") as lab, kube_feed(lab, "default") as feed:
        await lab.network("net", subnet="10.7.0.0/16", ipv6Subnet="2001:db8:7::/64")
        one = await lab.host("one", "--nodeport-addresses", "192.0.2.101/32")
        inventory.run(one.machine, "ip addr add 192.0.2.101/24 dev eth0")
        give_v6(lab)
        pod = await one.pod("a", network="net")
        await feed.put("web", pod, node_port=NODE_PORT, clusterIPs=[VIPS[4], VIPS[6]])
        async with answering(places([pod], 4), port=TARGET_PORT), answering(places([pod], 6), port=TARGET_PORT):
            with ExitStack() as closing:
                world = the_world(closing)
                assert names({await ask(world[4], "192.0.2.101", NODE_PORT)}) == {pod.name}
                assert await is_refused(world[4], one.address, NODE_PORT)
                assert await is_refused(world[6], "2001:db8:ffff::1", NODE_PORT)
                assert await is_ignored(world[4], "192.0.2.102", NODE_PORT), "nobody's address"
