"""The owner of a port, in its `external_ids` and in the alias of its device."""

from __future__ import annotations

import pytest

from weft.adapters.ovs.ovsdb.external_ids import device_alias, owner_external_ids, owner_from_alias
from weft.domain.desired.state import Port
from weft.domain.ids import TenantName
from weft.kernel.netlink.link import Link
from weft.ports.datapath import EndpointConfig

PORT = Port(tenant=TenantName("blue"), interface="wp1", mac="02:00:00:00:00:01", addresses=())


def config(netns: str) -> EndpointConfig:
    return EndpointConfig(
        port=PORT, netns=netns, interface="eth0", addresses=(), mtu=1450, endpoint="web@net1", workload="uid"
    )


def link_with(alias: str) -> Link:
    return Link(index=1, name="wp1", kind="", mac="", mtu=1450, up=True, alias=alias, group=0, master=0, peer=0)


@pytest.mark.parametrize(
    "netns",
    ["/run/netns/a", "", "/a b", "/a weft-tenant=red iface-id=wp2", "/a%20b=c", "/\u00e9\n=", "/a vm-uuid=other"],
)
def test_L1_an_alias_says_what_the_external_ids_say_whatever_the_path(netns: str) -> None:
    """Words and members of the alias are joined: no path adds one, or changes the tenant of a port."""
    alias = device_alias(config(netns))
    assert owner_from_alias(link_with(alias)) == owner_external_ids(config(netns))


def test_L1_an_alias_of_somebody_else_adds_no_other_member() -> None:
    assert owner_from_alias(link_with("weft-tenant=red vm-uuid=uid attached-mac=x")) == {"vm-uuid": "uid"}


def test_an_ordinary_alias_is_readable() -> None:
    assert device_alias(config("/run/netns/a")) == "endpoint-id=web@net1 vm-uuid=uid weft-netns=/run/netns/a"
