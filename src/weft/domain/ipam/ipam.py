"""Address allocation: which address of a network a holder may claim, so that none is ever allocated twice (ADR 2).

There are two kinds of allocation. *Claims*: one key per address in the store, written together with its holder.
*Blocks*: 64 addresses of a pool of 1,024 or more. A block belongs to one node, which allocates its addresses alone,
also while the store is unreachable. A block is either a node's or shared (without an owner), never both: a claim in a
large pool first makes its block shared, and a node takes only blocks that do not exist. Nodes take blocks from the top
of the pool, claims start at the bottom, so that they rarely compete.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterator
from functools import lru_cache

from weft.domain import codec, kinds, model
from weft.domain.addresses import (
    BITS,
    Address,
    Range,
    Subnet,
    address_hex,
    format_address,
    parse_address,
    parse_range,
    parse_subnet_v4,
    parse_subnet_v6,
)
from weft.domain.cluster import Cluster
from weft.domain.errors import Conflict, Exhausted, Invalid
from weft.domain.ids import GroupKey, NetworkKey, NodeName, StoreKey
from weft.domain.ipam.allocator import BLOCK_SIZE, EMPTY, NumberSet, choose, subtract
from weft.domain.store_types import NEVER, Delete, Put, Write
from weft.domain.transaction import ReadSet, holder_of, put_claim

# In a smaller pool a few nodes with blocks would leave nothing for the others.
EXCLUSIVE_FROM = 1024
# Prefix of the holder of an address that is reserved before its endpoint exists, as Docker does.
RESERVED = "reserved:"

Span = tuple[int, int]


def subnet_of(network: model.Network, family: int) -> Subnet | None:
    """The network's subnet of a family; None if it has none."""
    if family == 4:
        return _subnet_v4(network.subnet)
    return _subnet_v6(network.ipv6_subnet) if network.ipv6_subnet else None


# Parsing is the costliest part of an allocation, and the text of a subnet never changes.
_subnet_v4 = lru_cache(maxsize=4096)(parse_subnet_v4)
_subnet_v6 = lru_cache(maxsize=4096)(parse_subnet_v6)


def gateway_of(network: model.Network, family: int) -> Address | None:
    """The network's gateway of a family."""
    text = network.gateway if family == 4 else network.ipv6_gateway
    return parse_address(text, field="gateway") if text else None


def pool_of(group: model.Group) -> Range | None:
    """The address pool of the group; None if it has none."""
    return parse_range(group.ip_pool, field="ipPool", family=4) if group.ip_pool else None


def has_blocks(network: model.Network, family: int) -> bool:
    """Whether the network's pool of this family is large enough for blocks."""
    subnet = subnet_of(network, family)
    return subnet is not None and subnet.usable.size >= EXCLUSIVE_FROM


def gives_blocks(network: model.Network, group: model.Group | None) -> bool:
    """Whether endpoints of the group (or of none) get addresses from their node's blocks.

    In every family or in none: a node must be able to allocate all addresses of an endpoint without the store.
    """
    if group is not None and group.ip_pool:
        return False
    return all(has_blocks(network, family) for family in (4, 6) if subnet_of(network, family) is not None)


def spans_for(cluster: Cluster, network: model.Network, group: model.Group | None, family: int) -> list[Span]:
    """The addresses for endpoints of the group (or of none): usable, without the gateway and other groups' pools."""
    subnet = subnet_of(network, family)
    if subnet is None:
        return []
    own = pool_of(group) if group and family == 4 else None
    usable = own or subnet.usable
    gateway = gateway_of(network, family)
    holes = [(gateway.number, gateway.number)] if gateway else []
    if family == 4 and own is None:
        holes += [(pool.first, pool.last) for pool in cluster.pools.get(network.key, {}).values()]
    return list(subtract((usable.first, usable.last), holes))


def block_of(network: model.Network, address: Address) -> Address:
    """The first address of the block of an address. Blocks are aligned to the subnet's base, not to the span."""
    subnet = subnet_of(network, address.family)
    assert subnet is not None
    return Address(address.family, address.number - (address.number - subnet.base) % BLOCK_SIZE)


def block_key(network: model.Network, block: Address) -> StoreKey:
    return StoreKey(kinds.blocks_of(network.tenant, network.name) + address_hex(block))


def claim_key(network: model.Network, address: Address) -> StoreKey:
    return StoreKey(kinds.address_claims(network.tenant, network.name) + address_hex(address))


def _nodes_blocks(cluster: Cluster, network: model.Network, family: int) -> Iterator[Span]:
    for block, stored in cluster.blocks.get(network.key, {}).items():
        if stored.value.owner and block.family == family:
            yield block.number, block.number + BLOCK_SIZE - 1


def choose_address(
    cluster: Cluster,
    network: model.Network,
    group: model.Group | None,
    *,
    family: int,
    held: NumberSet = EMPTY,
    cooling: NumberSet = EMPTY,
) -> Address:
    """The lowest address that can be claimed, or `Exhausted`. `held` are addresses of commits in flight."""
    spans = spans_for(cluster, network, group, family)
    owned = list(_nodes_blocks(cluster, network, family)) if has_blocks(network, family) else []
    # Addresses of a node's block are allocated by that node alone.
    if owned:
        spans = [part for span in spans for part in subtract(span, owned)]
    taken = cluster.address_pool(network.key, family).taken
    number = choose(taken, spans, held=held, cooling=cooling)
    if number is None:
        where = f"group {group.key} (pool {group.ip_pool})" if group and group.ip_pool else f"network {network.key}"
        raise Exhausted(f"{where} has no free IPv{family} address left: delete endpoints or use a larger pool")
    return Address(family, number)


def used_addresses(cluster: Cluster, network: model.Network, *, family: int) -> NumberSet:
    """The addresses in use: claimed, or allocated by a node from its blocks."""
    used = cluster.address_pool(network.key, family).taken
    if has_blocks(network, family):
        # The pool's set is shared with the snapshot.
        used = used.copy()
        for endpoint in cluster.endpoints(network.key):
            text = endpoint.ip_address if family == 4 else endpoint.ipv6_address
            if text:
                used.add(parse_address(text, field="ipAddress").number)
    return used


def claim(
    reading: ReadSet, network: model.Network, group: model.Group | None, *, address: Address, holder: str, field: str
) -> list[Write]:
    """The writes that claim one address; `Conflict` if it is taken, `Invalid` if it cannot be allocated.

    `field` is the member of the request that asks for it.
    """
    check_claimable(reading, network, group, address=address, field=field)
    key = claim_key(network, address)
    present = reading.cluster.address_pool(network.key, address.family).holders.get(address.number)
    # A reservation has no identity: whichever endpoint asks for the address first takes it over.
    if present and present.value.holder != holder and not present.value.holder.startswith(RESERVED):
        raise Conflict(f"address {address} is taken by {present.value.holder}", field=field)
    reading.compare_revision(key, present.revision if present else NEVER)
    writes: list[Write] = [put_claim(key, holder)]
    if has_blocks(network, address.family):
        writes += _share_block(reading, network, address=address, field=field)
    return writes


def is_assignable(network: model.Network, address: Address) -> bool:
    """Whether an endpoint of the network could have the address at all: in its subnet, and not the gateway."""
    subnet = subnet_of(network, address.family)
    return subnet is not None and subnet.usable.holds(address) and address != gateway_of(network, address.family)


def is_block_of(network: model.Network, block: Address) -> bool:
    """Whether a node may have this block: the network's pool has blocks, and this is one of them."""
    subnet = subnet_of(network, block.family)
    if subnet is None or not has_blocks(network, block.family):
        return False
    span = Range(block.family, block.number, block.number + BLOCK_SIZE - 1)
    return block_of(network, block) == block and subnet.span.covers(span)


def block_owner(cluster: Cluster, network: model.Network, address: Address) -> str:
    """The node whose block contains an address; empty if there is none."""
    if not has_blocks(network, address.family):
        return ""
    block = cluster.blocks.get(network.key, {}).get(block_of(network, address))
    return block.value.owner if block else ""


def holds_address(cluster: Cluster, network: model.Network, endpoint: model.Endpoint, address: Address) -> bool:
    """Whether an endpoint has an address by right: by its claim, or by its node's block if nobody claims it.

    Others must not believe an endpoint that does not: a hostile node could publish it to take an address over (H3).
    """
    if not is_assignable(network, address):
        return False
    claimed = cluster.address_pool(network.key, address.family).holders.get(address.number)
    if claimed is not None:
        return claimed.value.holder == holder_of(kinds.ENDPOINT, endpoint)
    return bool(endpoint.host) and block_owner(cluster, network, address) == endpoint.host


def check_claimable(
    reading: ReadSet, network: model.Network, group: model.Group | None, *, address: Address, field: str
) -> None:
    """`Invalid` unless an endpoint of the group (or of none) may have the address."""
    # A group with a pool that contains the address may be created at the same moment.
    reading.compare_prefix(kinds.GROUP.store_prefix(network.tenant))
    spans = spans_for(reading.cluster, network, group, address.family)
    if not any(first <= address.number <= last for first, last in spans):
        where = f"pool {group.ip_pool} of group {group.name}" if group and group.ip_pool else f"network {network.name}"
        raise Invalid(f"address {address} cannot be allocated from {where}", field=field)


def _share_block(reading: ReadSet, network: model.Network, *, address: Address, field: str) -> list[Write]:
    block = block_of(network, address)
    key = block_key(network, block)
    present = reading.cluster.blocks.get(network.key, {}).get(block)
    reading.compare_revision(key, present.revision if present else NEVER)
    if present is None:
        return [Put(key, codec.encode(model.Block()))]
    if present.value.owner:
        raise Conflict(f"address {address} is in a block of node {present.value.owner}", field=field)
    return []


def reservation(key: NetworkKey | GroupKey) -> str:
    """The holder of an address that is reserved for an endpoint of the network or group."""
    return f"{RESERVED}{key}"


def reserved_for(cluster: Cluster, network: NetworkKey, group: GroupKey) -> Iterator[Address]:
    """The addresses of a network that are reserved for a group."""
    for family in BITS:
        for number, stored in cluster.address_pool(network, family).holders.items():
            if stored.value.holder == reservation(group):
                yield Address(family, number)


def release(network: model.Network, *addresses: str) -> list[Write]:
    """The writes that release addresses. Harmless for addresses from blocks, which have no claim."""
    return [Delete(claim_key(network, parse_address(text, field="IPAddress"))) for text in addresses if text]


def take_block(reading: ReadSet, network: model.Network, node: NodeName, *, family: int) -> tuple[Address, list[Write]]:
    """Allocate a block to a node, from the top of the pool; `Exhausted` if none is free."""
    subnet = subnet_of(network, family)
    assert subnet is not None
    reading.require(kinds.NETWORK, *network.key, field="networkName")
    reading.compare_prefix(kinds.GROUP.store_prefix(network.tenant))
    spans = spans_for(reading.cluster, network, None, family)
    known = reading.cluster.blocks.get(network.key, {})
    usable = subnet.usable
    # The first address of the topmost block.
    number = usable.last - (usable.last - subnet.base) % BLOCK_SIZE
    while number + BLOCK_SIZE > usable.first:
        block = Address(family, number)
        wholly_free = any(first <= number and number + BLOCK_SIZE - 1 <= last for first, last in spans)
        # A block must not contain a gateway or addresses of a group's pool.
        if wholly_free and block not in known:
            reading.compare_revision(block_key(network, block), NEVER)
            return block, [Put(block_key(network, block), codec.encode(model.Block(owner=node)))]
        number -= BLOCK_SIZE
    raise Exhausted(f"network {network.key} has no free block of {BLOCK_SIZE} IPv{family} addresses left")


def owned_blocks(cluster: Cluster, network: model.Network, node: NodeName, *, family: int) -> list[Span]:
    """The spans of a node's own blocks in a network."""
    blocks = cluster.blocks.get(network.key, {}).items()
    owned = sorted(block.number for block, stored in blocks if stored.value.owner == node and block.family == family)
    return [(first, first + BLOCK_SIZE - 1) for first in owned]


def choose_from_blocks(
    cluster: Cluster,
    network: model.Network,
    node: NodeName,
    *,
    family: int,
    held: NumberSet = EMPTY,
    cooling: NumberSet = EMPTY,
    returning: Container[Address] = (),
) -> Address | None:
    """The lowest free address of a node's own blocks; one in cooldown only if nothing else is free.

    Blocks that are being returned are skipped.
    """
    blocks = owned_blocks(cluster, network, node, family=family)
    spans = [span for span in blocks if Address(family, span[0]) not in returning]
    number = choose(cluster.numbers_in_use(network.key, family), spans, held=held, cooling=cooling)
    return None if number is None else Address(family, number)


def hold_block(reading: ReadSet, network: model.Network, node: NodeName, address: Address) -> None:
    """Compare that the address is in a block of the node; `Conflict` if it is not (any more)."""
    block = block_of(network, address)
    stored = reading.cluster.blocks.get(network.key, {}).get(block)
    if stored is None or stored.value.owner != node:
        raise Conflict(f"address {address} is in no block of node {node}")
    reading.compare_revision(block_key(network, block), stored.revision)


def return_block(reading: ReadSet, network: model.Network, node: NodeName, block: Address) -> list[Write]:
    """The writes that return a node's block; `Conflict` while an endpoint has one of its addresses."""
    stored = reading.cluster.blocks.get(network.key, {}).get(block)
    if stored is None or stored.value.owner != node:
        return []
    reading.compare_revision(block_key(network, block), stored.revision)
    # The node itself may publish an endpoint with an address of the block at the same moment.
    reading.compare_prefix(kinds.ENDPOINT.store_prefix(network.tenant, network.name))
    inside = Range(block.family, block.number, block.number + BLOCK_SIZE - 1)
    for endpoint in reading.cluster.endpoints(network.key):
        text = endpoint.ip_address if block.family == 4 else endpoint.ipv6_address
        if text and inside.holds(parse_address(text, field="ipAddress")):
            raise Conflict(f"block {format_address(*block)} holds the address of endpoint {endpoint.key}")
    return [Delete(block_key(network, block))]


def describe(spans: Collection[Span], family: int) -> str:
    """Runs of addresses in Contiv's format: `10.1.1.1-10.1.1.4, 10.1.1.6`."""
    return ", ".join(str(Range(family, first, last)) for first, last in spans)
