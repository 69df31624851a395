"""`--nodeport-addresses` restricts node ports to selected host addresses (CVE-2020-8558, CVE-2021-25736)."""

from __future__ import annotations

from contextlib import ExitStack

from tests.support import inventory
from tests.support.external_hosts import (
    NODE_PORT,
    VIPS,
    add_ipv6_underlay,
    external_client,
    pod_addresses,
    responder_names,
)
from tests.support.kube_feed import TARGET_PORT, kube_feed
from tests.support.responders import answering, gets_no_reply, is_refused, query

from weft.lab.netlab import open_lab


async def test_node_ports_are_open_on_selected_addresses_only() -> None:
    """They are closed on other addresses of the host and on the family that is not listed."""
    async with open_lab(store="etcd") as lab, kube_feed(lab, "default") as feed:
        await lab.network("net", subnet="10.7.0.0/16", ipv6Subnet="2001:db8:7::/64")
        one = await lab.host("one", "--nodeport-addresses", "192.0.2.101/32")
        inventory.run(one.netns, "ip addr add 192.0.2.101/24 dev eth0")
        add_ipv6_underlay(lab)
        pod = await one.pod("a", network="net")
        await feed.put("web", pod, node_port=NODE_PORT, clusterIPs=[VIPS[4], VIPS[6]])
        async with (
            answering(pod_addresses([pod], 4), port=TARGET_PORT),
            answering(pod_addresses([pod], 6), port=TARGET_PORT),
        ):
            with ExitStack() as closing:
                external = external_client(closing)
                assert responder_names({await query(external[4], "192.0.2.101", NODE_PORT)}) == {pod.name}
                assert await is_refused(external[4], one.address, NODE_PORT)
                assert await is_refused(external[6], "2001:db8:ffff::1", NODE_PORT)
                assert await gets_no_reply(external[4], "192.0.2.102", NODE_PORT), "an unassigned address"
