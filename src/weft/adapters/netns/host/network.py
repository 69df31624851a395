"""The host's end of host access: links, routes and rules in the node's own namespace, where most is not ours.

Ours is what bears our marks: devices by name, routes by protocol, one table, and rules by comment in chains
of others that would drop our packets. When the last tenant has gone nothing is left, but that the host forwards.
"""

from __future__ import annotations

import errno
import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Set
from pathlib import Path

from weft.adapters.netns.host.entries import HOST_MAC
from weft.adapters.netns.host.maps import HostEntry, change_host_entries, host_entries_of, place_of
from weft.adapters.netns.host.ruleset import (
    COMMENT,
    HOST_PREFIX,
    HOST_TABLE,
    HostRules,
    HostSurroundings,
    host_table,
    passing_rules,
    rules_of,
)
from weft.adapters.netns.kernel_state import HOP_MAC, NODE_V4, NODE_V6, PORT_MAC
from weft.adapters.netns.nft.policy_chains import INSIDE
from weft.adapters.netns.tenant_netns import TenantNetnsDriver
from weft.domain.addresses import BITS, Address, Range
from weft.domain.desired.state import StateItem
from weft.domain.host_access.state import (
    ExternalAddress,
    HostLink,
    HostPort,
    NodePort,
    NodePortVip,
    OverlapDnat,
    TenantSnat,
    TenantSubnet,
    is_hosts,
)
from weft.domain.ids import TenantName
from weft.domain.policy.model.protocols import UDP
from weft.kernel.netlink.conntrack import forget_each, read_connections
from weft.kernel.netlink.link import (
    Device,
    alter_link,
    alter_protocols,
    create_veth,
    delete_link,
    read_link,
    read_links,
)
from weft.kernel.netlink.neigh import Neighbour, put_neighbour
from weft.kernel.netlink.nft_set import INET, SetName, has_set, read_generation
from weft.kernel.netlink.route import LinkAddress, Prefix, Route, drop_route, put_address, put_route, read_routes
from weft.kernel.netlink.socket import NETFILTER, NetlinkError, NetlinkSocket
from weft.kernel.netns import Namespace
from weft.kernel.nftables import open_nftables

# Begins what a person is told about a link; the rest is the tenant's name.
_ALIAS = "weft:host:"
# A route of the host's own to the same subnet is better than ours.
_METRIC = 8700
_SPACE_HOPS = {4: NODE_V4, 6: NODE_V6}
_LOOPBACK = Range(4, 127 << 24, (128 << 24) - 1)
_FORWARDS_V6 = "net/ipv6/conf/all/forwarding"
_V6_SETTINGS = Path("/proc/sys/net/ipv6/conf")


def host_link_name(tenant: TenantName) -> str:
    """The name of the host's end of the link to a tenant's space."""
    return HOST_PREFIX + hashlib.sha256(tenant.encode()).hexdigest()[:9]


class HostNetwork:
    """See the module. What it was told is kept, so that routes and ports can be made as soon as their link is there."""

    def __init__(self, namespace: Namespace, netlink: NetlinkSocket, surroundings: HostSurroundings) -> None:
        self._namespace = namespace
        self._netlink = netlink
        self._netfilter = NetlinkSocket(NETFILTER, namespace=namespace)
        self._nftables = open_nftables(namespace)
        self._surroundings = surroundings
        self._told: defaultdict[TenantName, set[StateItem]] = defaultdict(set)
        # Those of them that the table depends on: services have very many others.
        self._ruling: set[StateItem] = set()
        # Whether the table is there, and holds what it should as far as we know.
        self._is_made = False
        self._generation = 0
        self._has_v6 = namespace.run(_has_v6)

    def close(self) -> None:
        self._nftables.close()
        self._netfilter.close()

    def put_link(self, part: HostLink, space: TenantNetnsDriver, *, mtu: int) -> bool:
        """The link stands when this returns, both ends up; whether it had to be made."""
        name = host_link_name(part.tenant)
        link = read_link(self._netlink, name)
        made = link is None or INSIDE not in space.indexes
        if link is not None and made:
            self._netlink.send_batch([delete_link(link.index)])  # its other end is in a space that is no more
        if made:
            end, peer = Device(name=name, mac=HOST_MAC, mtu=mtu), Device(name=INSIDE, mac=PORT_MAC, mtu=mtu)
            self._netlink.send_batch([create_veth(end, peer, peer_namespace=space.namespace.fd)])
            link = read_link(self._netlink, name)
        assert link is not None
        space.note_links()
        inside = space.indexes[INSIDE]
        self._netlink.send_batch(
            [
                alter_protocols(link.index, link_local=False),
                alter_link(link.index, alias=f"{_ALIAS}{part.tenant}"),
                alter_link(link.index, up=True),
                *(put_address(LinkAddress(link=link.index, prefix=_whole(own), prefix_route=False))
                  for own in part.addresses if own.family == 6 and self._has_v6),
                *(put_neighbour(Neighbour(link=link.index, address=hop, mac=HOP_MAC))
                  for family, hop in _SPACE_HOPS.items() if self._speaks(family)),
            ]
        )  # fmt: skip
        space.netlink.send_batch([alter_link(inside, up=True)])
        for netlink, each in ((self._netlink, name), (space.netlink, INSIDE)):
            read_link(netlink, each)  # being asked, the kernel lets both ends send at once
        return made

    def drop_link(self, tenant: TenantName) -> None:
        """No such link; its routes go with it."""
        link = read_link(self._netlink, host_link_name(tenant))
        if link is not None:
            self._netlink.send_batch([delete_link(link.index)])

    def change(self, *, drop: Iterable[StateItem], put: Iterable[StateItem]) -> None:
        """Routes, table and rules for what was told so far, less some parts and with others. Links are there."""
        gone, new = ({each for each in parts if is_hosts(each)} for parts in (drop, put))
        gone, new = gone - new, {each for each in new if each not in self._told[each.tenant]}
        if not gone and not new:
            return
        joined = {each.tenant for each in gone | new if isinstance(each, HostLink)}  # all of theirs may change
        links = {each for each in self._ruling if isinstance(each, HostLink)}
        former = self._routes(gone.union(*(self._told[tenant] for tenant in joined)), links)
        ruling = {each for each in gone | new if _rules(each)}
        before = self._entries_near(ruling)
        self._tell(drop=gone, put=new)
        wanted = self._routes(new.union(*(self._told[tenant] for tenant in joined)), (links - gone) | new)
        self._netlink.send_batch([*map(drop_route, former - wanted), *map(put_route, wanted - former)])
        if ruling:
            # Sets of ranges are not changed by elements: they are few, and seldom others.
            self._is_made &= not any(isinstance(each, ExternalAddress) and each.sources is not None for each in ruling)
            self._change_rules(before, self._entries_near(ruling))
            if any(map(_is_of_loopback, ruling)):
                self._route_loopback()
            self._forget(rules_of(gone), rules_of(new))

    def _entries_near(self, parts: Set[StateItem]) -> frozenset[HostEntry]:
        """The entries that some parts have, or would have if they were there, or others have in their place."""
        if not parts:
            return frozenset()
        places = {place_of(part) for part in parts}
        anywhere = any(isinstance(part, NodePortVip) for part in parts)
        near = (each for each in self._ruling if anywhere or isinstance(each, NodePortVip) or place_of(each) in places)
        return host_entries_of(rules_of(near))

    def _change_rules(self, before: Set[HostEntry], after: Set[HostEntry]) -> None:
        """The table as it should be now: by its elements alone, where it is there and nobody else has changed it."""
        if self._is_made and self._has_links():
            self._is_made = False
            try:
                change_host_entries(self._netfilter, drop=before - after, put=after - before)
                self._is_made = True
            except NetlinkError as refusal:
                if refusal.errno not in {errno.ENOENT, errno.EEXIST}:
                    raise
        if not self._is_made or not self._has_links():
            self._write_rules()

    def _tell(self, *, drop: Iterable[StateItem], put: Iterable[StateItem]) -> None:
        for part in drop:
            self._told[part.tenant].discard(part)
            self._ruling.discard(part)
        for part in put:
            self._told[part.tenant].add(part)
            if _rules(part):
                self._ruling.add(part)

    def converge(self, wanted: Set[StateItem]) -> list[str]:
        """Mend what differs, links apart, and remove links that are nobody's; what was mended."""
        self._told.clear()
        self._ruling.clear()
        self._tell(drop=(), put=filter(is_hosts, wanted))
        links = {each for each in wanted if isinstance(each, HostLink)}
        names = {host_link_name(each.tenant) for each in links}
        repaired: list[str] = []
        indexes = self._indexes()
        for name in indexes.keys() - names:
            repaired.append(f"removed device {name}")
            self._netlink.send_batch([delete_link(indexes.pop(name))])
        ours = {*indexes.values()}
        there = frozenset(route for route in read_routes(self._netlink) if route.link in ours)
        routes = self._routes((each for parts in self._told.values() for each in parts), links)
        self._netlink.send_batch([*map(drop_route, there - routes), *map(put_route, routes - there)])
        repaired += [f"added route {each}" for each in routes - there]
        repaired += [f"removed route {each}" for each in there - routes]
        if names and not self._has_table():
            repaired.append(f"made table inet {HOST_TABLE}")
        repaired += self._write_rules()
        self._route_loopback()
        return [f"host: {each}" for each in repaired]

    def _route_loopback(self) -> None:
        """What the host calls at ports of loopback leaves by the links of tenants that have such ports, by no other.

        The tenant's space drops what is for loopback or from it, so nobody there makes use of it (CVE-2020-8558).
        """
        asked = {host_link_name(each.tenant) for each in self._ruling if _is_of_loopback(each)}
        wanted = {f"net/ipv4/conf/{name}/route_localnet": str(int(name in asked)) for name in self._indexes()}
        self._namespace.write_sysctls(wanted)

    def is_disturbed(self) -> bool:
        """Whether others have taken our table away, as when a firewall is set up anew."""
        generation = read_generation(self._netfilter)
        changed, self._generation = generation != self._generation, generation
        return changed and self._has_links() and not self._has_table()

    def _has_links(self) -> bool:
        return any(isinstance(each, HostLink) for each in self._ruling)

    def _write_rules(self) -> list[str]:
        """The table and what stands beside it, while there is a tenant; nothing of it else. What others must know."""
        self._is_made = False
        if not self._has_links():
            self._run(f"delete table inet {HOST_TABLE}\n" if self._has_table() else "", *self._passing(keep=False))
            return []
        changed = self._forward()
        self._nftables.run(host_table(rules_of(self._ruling), self._surroundings))
        self._is_made = True
        passing = [*self._passing(keep=True)]
        self._run(*passing)
        return changed + ["let workloads pass a chain that drops what it does not know" for _ in passing]

    def _run(self, *commands: str) -> None:
        if joined := "".join(commands):
            self._nftables.run(joined)

    def _forget(self, gone: HostRules, new: HostRules) -> None:
        """Forget the connections of what leads elsewhere now, or nowhere: those of UDP would never end.

        Those of others end by themselves, but where a workload has left them. To look for them takes long.
        """
        ports = {(each.family, each.protocol, each.port) for each in gone.ports}
        ports |= {(each.family, each.protocol, each.port) for each in new.ports if each.protocol == UDP}
        lasting = [each for each in gone.node_ports | new.node_ports if each.protocol == UDP]
        ports |= {(family, each.protocol, each.port) for each in lasting for family in (4, 6)}
        addresses = {each.address for each in gone.reaches | new.reaches}
        families = {family for family, _, _ in ports} | {address.family for address in addresses}
        for family in families:
            stale = (
                each
                for each in read_connections(self._netfilter, family=family)
                if (family, each.original.protocol, each.original.destination_port) in ports
                or each.original.destination in addresses
            )
            forget_each(self._netfilter, stale, family=family)

    def _forward(self) -> list[str]:
        """The host forwards. A host that learnt its v6 default route goes on listening to routers."""
        wanted = {"net/ipv4/ip_forward": "1"}
        if self._has_v6:
            wanted |= self._namespace.run(_listening) | {_FORWARDS_V6: "1"}
        before = self._namespace.run(lambda: {name: _read(name) for name in wanted})
        self._namespace.write_sysctls(wanted)
        return [f"set {name} to {value}" for name, value in wanted.items() if before[name] != value]

    def _passing(self, *, keep: bool) -> Iterator[str]:
        """What puts our rules into others' chains where they are missing, or takes them out."""
        listed = self._nftables.read("list ruleset", elements=False)
        rules = [each["rule"] for each in listed if each.get("rule", {}).get("comment") == COMMENT]
        if not keep:
            for rule in rules:
                yield f"delete rule {rule['family']} {rule['table']} {rule['chain']} handle {rule['handle']}\n"
            return
        marked = {(rule["family"], rule["table"], rule["chain"]) for rule in rules}
        for item in listed:
            chain = item.get("chain", {})
            place = chain.get("family", ""), chain.get("table", ""), chain.get("name", "")
            if chain.get("hook") == "forward" and chain.get("policy") == "drop" and place not in marked:
                yield passing_rules(*place)

    def _has_table(self) -> bool:
        return has_set(self._netfilter, SetName(INET, HOST_TABLE, "ports4"))

    def _indexes(self) -> dict[str, int]:
        """Our ends of links, by name."""
        return {link.name: link.index for link in read_links(self._netlink) if link.name.startswith(HOST_PREFIX)}

    def _index_of(self, tenant: TenantName) -> int:
        """Of our end of a tenant's link; 0 where there is none."""
        link = read_link(self._netlink, host_link_name(tenant))
        return 0 if link is None else link.index

    def _routes(self, parts: Iterable[StateItem], links: Iterable[StateItem]) -> frozenset[Route]:
        """The ways to what some parts name, by the links that are there."""
        parts = tuple(parts)
        indexes = {tenant: self._index_of(tenant) for tenant in {part.tenant for part in parts}}
        own = {each.tenant: {address.family: address for address in each.addresses} for each in links
               if isinstance(each, HostLink)}  # fmt: skip
        found: set[Route] = set()
        for part in parts:
            link = indexes[part.tenant]
            for to in _targets(part) if link else ():
                family = to.address.family
                if self._speaks(family):
                    source, hop = own.get(part.tenant, {}).get(family), _SPACE_HOPS[family]
                    found.add(Route(to=to, link=link, via=hop, on_link=True, source=source, metric=_METRIC))
        return frozenset(found)

    def _speaks(self, family: int) -> bool:
        return family == 4 or self._has_v6


def _rules(part: StateItem) -> bool:
    """Whether the table and its surroundings depend on a part."""
    if isinstance(part, ExternalAddress):
        return part.scope != "host"
    return isinstance(part, HostLink | HostPort | NodePort | NodePortVip)


def _is_of_loopback(part: StateItem) -> bool:
    """Whether a part is a port of the host that only the host itself can call."""
    return isinstance(part, HostPort) and part.address is not None and _LOOPBACK.holds(part.address)


def _targets(part: StateItem) -> Iterator[Prefix]:
    """To what the host has a way because of a part."""
    match part:
        case TenantSubnet(routed=True):
            yield Prefix(Address(part.subnet.family, part.subnet.base), part.subnet.length)
        case TenantSnat() | OverlapDnat() | ExternalAddress():
            yield _whole(part.address)
        case NodePortVip():
            yield from map(_whole, part.addresses)


def _whole(address: Address) -> Prefix:
    return Prefix(address, BITS[address.family])


def _has_v6() -> bool:
    try:
        return (_V6_SETTINGS / "all" / "disable_ipv6").read_text().strip() == "0"
    except OSError:
        return False


def _listening() -> dict[str, str]:
    """The devices that hear routers now, and would no longer when the host forwards."""
    if _read(_FORWARDS_V6) == "1":
        return {}
    found = (path for path in _V6_SETTINGS.glob("*/accept_ra") if path.read_text().strip() == "1")
    return {str(path.relative_to("/proc/sys")): "2" for path in found}


def _read(name: str) -> str:
    return (Path("/proc/sys") / name).read_text().strip()
