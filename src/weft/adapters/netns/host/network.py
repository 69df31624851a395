"""Host access in the host netns: links to tenants, routes and nft rules, among everything else that is on the host.

Our objects are recognized by name (devices, the table), by route protocol, and by comment (rules in chains of others
that would drop our packets). When the last tenant is gone all are removed; only the forwarding sysctls stay.
"""

from __future__ import annotations

import errno
import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Set
from pathlib import Path

from weft.adapters.netns.devices import (
    HOP_MAC,
    HOST_LINK_PREFIX,
    HOST_MAC,
    NODE_V4,
    NODE_V6,
    PORT_MAC,
    TENANT_HOST_LINK,
)
from weft.adapters.netns.host.ruleset import (
    COMMENT,
    HOST_TABLE,
    HostConfig,
    HostEntry,
    HostRules,
    accept_rules,
    apply_host_entries,
    host_rules,
    host_ruleset_entries,
    host_table,
    sharing_key,
)
from weft.adapters.netns.kernel_state import host_prefix
from weft.adapters.netns.tenant_netns import TenantNetnsDriver
from weft.domain.addresses import Address, Range
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
    is_host_scoped,
)
from weft.domain.ids import TenantName
from weft.domain.loadbalancer.state import FrontendSources
from weft.domain.policy.model.protocols import UDP
from weft.kernel.netlink.conntrack import delete_connections, read_connections
from weft.kernel.netlink.link import (
    Device,
    change_address_settings,
    change_link,
    create_veth,
    delete_link,
    read_link,
    read_links,
)
from weft.kernel.netlink.neigh import Neighbour, put_neighbour
from weft.kernel.netlink.nft_set import SetName, has_set, read_generation
from weft.kernel.netlink.route import LinkAddress, Prefix, Route, drop_route, put_address, put_route, read_routes
from weft.kernel.netlink.socket import NetlinkError, NetlinkSocket
from weft.kernel.netns import Namespace
from weft.kernel.nftables import open_nftables
from weft.kernel.uapi.netlink import NETLINK_NETFILTER
from weft.kernel.uapi.nf_tables import NFPROTO_INET

# Prefix of the ifalias of a link; the rest is the tenant's name.
_ALIAS = "weft:host:"
# High, so that the host's own route to the same subnet wins.
_METRIC = 8700
_TENANT_HOPS = {4: NODE_V4, 6: NODE_V6}
_LOOPBACK = Range(4, 127 << 24, (128 << 24) - 1)
_FORWARDING_V6 = "net/ipv6/conf/all/forwarding"
_IPV6_CONF = Path("/proc/sys/net/ipv6/conf")


def host_link_name(tenant: TenantName) -> str:
    """Return the name of the host's end of the link to a tenant."""
    # A hash: tenant names may have more than the 15 characters of an interface name.
    return HOST_LINK_PREFIX + hashlib.sha256(tenant.encode()).hexdigest()[:9]


class HostNetwork:
    """See the module. It keeps the state items applied so far, so that a later link gets its routes and rules."""

    def __init__(self, namespace: Namespace, netlink: NetlinkSocket, host_config: HostConfig) -> None:
        self._namespace = namespace
        self._netlink = netlink
        self._netfilter = NetlinkSocket(NETLINK_NETFILTER, namespace=namespace)
        self._nftables = open_nftables(namespace)
        self._host_config = host_config
        self._items: defaultdict[TenantName, set[StateItem]] = defaultdict(set)
        # The items that the table depends on. Services have very many others.
        self._table_items: set[StateItem] = set()
        # Whether the table exists and, as far as we know, holds what it should.
        self._table_in_sync = False
        self._generation = 0
        self._has_v6 = namespace.run(_has_v6)

    def close(self) -> None:
        self._nftables.close()
        self._netfilter.close()

    def put_link(self, item: HostLink, netns: TenantNetnsDriver, *, mtu: int) -> bool:
        """Ensure that the link exists and both ends are up; return whether it had to be created."""
        name = host_link_name(item.tenant)
        link = read_link(self._netlink, name)
        created = link is None or TENANT_HOST_LINK not in netns.indexes
        if link is not None and created:
            # Its other end is in a former netns of the tenant.
            self._netlink.send_batch([delete_link(link.index)])
        if created:
            end, peer = Device(name=name, mac=HOST_MAC, mtu=mtu), Device(name=TENANT_HOST_LINK, mac=PORT_MAC, mtu=mtu)
            self._netlink.send_batch([create_veth(end, peer, peer_namespace=netns.namespace.fd)])
            link = read_link(self._netlink, name)
        assert link is not None
        netns.refresh_links()
        self._netlink.send_batch(
            [
                change_address_settings(link.index, link_local=False),
                change_link(link.index, alias=f"{_ALIAS}{item.tenant}"),
                change_link(link.index, up=True),
                *(put_address(LinkAddress(link=link.index, prefix=host_prefix(own), prefix_route=False))
                  for own in item.addresses if own.family == 6 and self._has_v6),
                *(put_neighbour(Neighbour(link=link.index, address=hop, mac=HOP_MAC))
                  for family, hop in _TENANT_HOPS.items() if self._has_family(family)),
            ]
        )  # fmt: skip
        netns.netlink.send_batch([change_link(netns.indexes[TENANT_HOST_LINK], up=True)])
        # The kernel updates the carrier state of a link lazily. Reading the link forces it, so that both ends can send
        # at once.
        for netlink, link_name in ((self._netlink, name), (netns.netlink, TENANT_HOST_LINK)):
            read_link(netlink, link_name)
        return created

    def drop_link(self, tenant: TenantName) -> None:
        """Delete the link if it exists. The kernel deletes its routes with it."""
        link = read_link(self._netlink, host_link_name(tenant))
        if link is not None:
            self._netlink.send_batch([delete_link(link.index)])

    def change(self, *, drop: Iterable[StateItem], put: Iterable[StateItem]) -> None:
        """Remove some state items and apply others: routes, table and rules. The links exist already."""
        gone, new = ({item for item in items if is_host_scoped(item)} for items in (drop, put))
        gone, new = gone - new, {item for item in new if item not in self._items[item.tenant]}
        if not gone and not new:
            return
        # All routes of a tenant depend on its link and on the host's addresses.
        relinked = {item.tenant for item in gone | new if isinstance(item, HostLink)}
        links = {item for item in self._table_items if isinstance(item, HostLink)}
        former = self._routes(gone.union(*(self._items[tenant] for tenant in relinked)), links)
        changed = {item for item in gone | new if _affects_table(item)}
        before = self._entries_near(changed)
        self._remember(drop=gone, put=new)
        wanted = self._routes(new.union(*(self._items[tenant] for tenant in relinked)), (links - gone) | new)
        self._netlink.send_batch([*map(drop_route, former - wanted), *map(put_route, wanted - former)])
        if changed:
            # Interval sets are not changed by elements: they are few and rarely change, so the table is replaced.
            if any(isinstance(item, FrontendSources) for item in changed):
                self._table_in_sync = False
            self._change_table(before, self._entries_near(changed))
            if any(map(_is_loopback_port, changed)):
                self._write_route_localnet()
            self._flush_stale_connections(host_rules(gone), host_rules(new))

    def _entries_near(self, items: Set[StateItem]) -> frozenset[HostEntry]:
        """Return the present entries of some items, and of all others that compete with them for the same keys."""
        if not items:
            return frozenset()
        keys = {sharing_key(item) for item in items}
        # Every node port leads to a VIP, so a change of one concerns all node ports.
        has_vip = any(isinstance(item, NodePortVip) for item in items)
        near = (
            item for item in self._table_items if has_vip or isinstance(item, NodePortVip) or sharing_key(item) in keys
        )
        return host_ruleset_entries(host_rules(near))

    def _change_table(self, before: Set[HostEntry], after: Set[HostEntry]) -> None:
        """Bring the table up to date: by its elements alone if it is in sync, else as a whole."""
        if self._table_in_sync and self._has_links():
            self._table_in_sync = False
            try:
                apply_host_entries(self._netfilter, drop=before - after, put=after - before)
                self._table_in_sync = True
            except NetlinkError as error:
                if error.errno not in {errno.ENOENT, errno.EEXIST}:
                    raise
        if not self._table_in_sync or not self._has_links():
            self._write_table()

    def _remember(self, *, drop: Iterable[StateItem], put: Iterable[StateItem]) -> None:
        for item in drop:
            self._items[item.tenant].discard(item)
            self._table_items.discard(item)
        for item in put:
            self._items[item.tenant].add(item)
            if _affects_table(item):
                self._table_items.add(item)

    def converge(self, wanted: Set[StateItem]) -> list[str]:
        """Repair what differs, except links, and remove links that no tenant needs; return the repairs."""
        self._items.clear()
        self._table_items.clear()
        self._remember(drop=(), put=filter(is_host_scoped, wanted))
        links = {item for item in wanted if isinstance(item, HostLink)}
        names = {host_link_name(item.tenant) for item in links}
        repaired: list[str] = []
        indexes = self._read_indexes()
        for name in indexes.keys() - names:
            repaired.append(f"removed device {name}")
            self._netlink.send_batch([delete_link(indexes.pop(name))])
        ours = {*indexes.values()}
        existing = frozenset(route for route in read_routes(self._netlink) if route.link in ours)
        routes = self._routes((item for items in self._items.values() for item in items), links)
        self._netlink.send_batch([*map(drop_route, existing - routes), *map(put_route, routes - existing)])
        repaired += [f"added route {route}" for route in routes - existing]
        repaired += [f"removed route {route}" for route in existing - routes]
        if names and not self._has_table():
            repaired.append(f"created table inet {HOST_TABLE}")
        repaired += self._write_table()
        self._write_route_localnet()
        return [f"host: {repair}" for repair in repaired]

    def _write_route_localnet(self) -> None:
        """Set `route_localnet` on the links of tenants with loopback host ports, and clear it on the others.

        It lets the host call such a port. The tenant netns and the host table drop packets from and to loopback
        addresses, so a workload cannot use it (CVE-2020-8558).
        """
        with_ports = {host_link_name(item.tenant) for item in self._table_items if _is_loopback_port(item)}
        self._namespace.write_sysctls(
            {f"net/ipv4/conf/{name}/route_localnet": str(int(name in with_ports)) for name in self._read_indexes()}
        )

    def has_drifted(self) -> bool:
        """Return whether others have deleted our table, as a firewall does that replaces the ruleset."""
        # Others change the host's nftables all the time: only a new generation makes it worth looking.
        generation = read_generation(self._netfilter)
        changed, self._generation = generation != self._generation, generation
        return changed and self._has_links() and not self._has_table()

    def _has_links(self) -> bool:
        return any(isinstance(item, HostLink) for item in self._table_items)

    def _write_table(self) -> list[str]:
        """Replace the table and the rules in chains of others, or without tenants remove them; return the repairs."""
        self._table_in_sync = False
        if not self._has_links():
            delete = f"delete table inet {HOST_TABLE}\n" if self._has_table() else ""
            self._run(delete, *self._foreign_rules(keep=False))
            return []
        changed = self._enable_forwarding()
        self._nftables.run(host_table(host_rules(self._table_items), self._host_config))
        self._table_in_sync = True
        added = [*self._foreign_rules(keep=True)]
        self._run(*added)
        return changed + ["added accept rules to a foreign chain that drops by default" for _ in added]

    def _run(self, *commands: str) -> None:
        if joined := "".join(commands):
            self._nftables.run(joined)

    def _flush_stale_connections(self, gone: HostRules, new: HostRules) -> None:
        """Delete conntrack entries of ports and addresses that lead elsewhere now. Those of UDP would never expire.

        TCP connections end by themselves, unless the workload behind a host port is gone.
        """
        ports = {(each.family, each.protocol, each.port) for each in gone.host_ports}
        ports |= {(each.family, each.protocol, each.port) for each in new.host_ports if each.protocol == UDP}
        udp_node_ports = [each for each in gone.node_ports | new.node_ports if each.protocol == UDP]
        ports |= {(family, each.protocol, each.port) for each in udp_node_ports for family in (4, 6)}
        addresses = {each.address for each in gone.external | new.external}
        addresses |= {each.frontend.address for each in gone.sources | new.sources}
        # A dump of all connections of a family is expensive, so families without a change are skipped.
        families = {family for family, _, _ in ports} | {address.family for address in addresses}
        for family in families:
            stale = (
                each
                for each in read_connections(self._netfilter, family=family)
                if (family, each.original.protocol, each.original.destination_port) in ports
                or each.original.destination in addresses
            )
            delete_connections(self._netfilter, stale, family=family)

    def _enable_forwarding(self) -> list[str]:
        """Enable forwarding on the host; return the sysctls that were changed."""
        wanted = {"net/ipv4/ip_forward": "1"}
        if self._has_v6:
            wanted |= self._namespace.run(_keep_accepting_ra) | {_FORWARDING_V6: "1"}
        before = self._namespace.run(lambda: {name: _read_sysctl(name) for name in wanted})
        self._namespace.write_sysctls(wanted)
        return [f"set {name} to {value}" for name, value in wanted.items() if before[name] != value]

    def _foreign_rules(self, *, keep: bool) -> Iterator[str]:
        """Yield commands that add our rules to others' chains where they are missing, or that delete them."""
        listed = self._nftables.read("list ruleset", elements=False)
        rules = [each["rule"] for each in listed if each.get("rule", {}).get("comment") == COMMENT]
        if not keep:
            for rule in rules:
                yield f"delete rule {rule['family']} {rule['table']} {rule['chain']} handle {rule['handle']}\n"
            return
        done = {(rule["family"], rule["table"], rule["chain"]) for rule in rules}
        for entry in listed:
            chain = entry.get("chain", {})
            location = chain.get("family", ""), chain.get("table", ""), chain.get("name", "")
            if chain.get("hook") == "forward" and chain.get("policy") == "drop" and location not in done:
                yield accept_rules(*location)

    def _has_table(self) -> bool:
        return has_set(self._netfilter, SetName(NFPROTO_INET, HOST_TABLE, "host_ports4"))

    def _read_indexes(self) -> dict[str, int]:
        """Read the interface indexes of our ends of links, by name."""
        return {link.name: link.index for link in read_links(self._netlink) if link.name.startswith(HOST_LINK_PREFIX)}

    def _read_index(self, tenant: TenantName) -> int:
        """Read the interface index of our end of a tenant's link; 0 if there is none."""
        link = read_link(self._netlink, host_link_name(tenant))
        return 0 if link is None else link.index

    def _routes(self, items: Iterable[StateItem], links: Iterable[StateItem]) -> frozenset[Route]:
        """Return the routes of some items over the links that exist."""
        items = tuple(items)
        indexes = {tenant: self._read_index(tenant) for tenant in {item.tenant for item in items}}
        own = {item.tenant: {address.family: address for address in item.addresses} for item in links
               if isinstance(item, HostLink)}  # fmt: skip
        routes: set[Route] = set()
        for item in items:
            link = indexes[item.tenant]
            for to in _destinations(item) if link else ():
                family = to.address.family
                if self._has_family(family):
                    source, hop = own.get(item.tenant, {}).get(family), _TENANT_HOPS[family]
                    routes.add(Route(to=to, link=link, via=hop, on_link=True, source=source, metric=_METRIC))
        return frozenset(routes)

    def _has_family(self, family: int) -> bool:
        return family == 4 or self._has_v6


def _affects_table(item: StateItem) -> bool:
    """Return whether the table and the rules in foreign chains depend on an item."""
    if isinstance(item, ExternalAddress):
        return item.scope != "host"
    return isinstance(item, HostLink | HostPort | NodePort | NodePortVip | FrontendSources)


def _is_loopback_port(item: StateItem) -> bool:
    """Return whether an item is a host port of a loopback address, which only the host itself can call."""
    return isinstance(item, HostPort) and item.address is not None and _LOOPBACK.holds(item.address)


def _destinations(item: StateItem) -> Iterator[Prefix]:
    """Yield what the host needs routes to because of an item."""
    match item:
        case TenantSubnet(routed=True):
            yield Prefix(Address(item.subnet.family, item.subnet.base), item.subnet.length)
        case TenantSnat() | OverlapDnat() | ExternalAddress():
            yield host_prefix(item.address)
        case NodePortVip():
            yield from map(host_prefix, item.addresses)


def _has_v6() -> bool:
    try:
        return (_IPV6_CONF / "all" / "disable_ipv6").read_text().strip() == "0"
    except OSError:
        # The kernel has no IPv6 at all.
        return False


def _keep_accepting_ra() -> dict[str, str]:
    """Return the sysctls of interfaces that accept router advertisements: with forwarding on they need the value 2."""
    if _read_sysctl(_FORWARDING_V6) == "1":
        return {}
    accepting = (path for path in _IPV6_CONF.glob("*/accept_ra") if path.read_text().strip() == "1")
    return {str(path.relative_to("/proc/sys")): "2" for path in accepting}


def _read_sysctl(name: str) -> str:
    return (Path("/proc/sys") / name).read_text().strip()
