"""An auditor of the stored state: parses keys and JSON without the domain code, and reports violations.

Invariants at every revision: no address, tag or ID has two holders; every claim has its holder, and every holder its
claim (or a block of its node); nothing refers to a deleted object.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import lru_cache
from ipaddress import ip_address, ip_network
from typing import Any

BLOCK = 64
LARGE = 1024

Key = tuple[str, ...]
Document = dict[str, Any]


def audit(entries: Mapping[str, bytes]) -> list[str]:
    """The violations in this state; empty for a valid one."""
    return list(_Auditor(entries).faults())


class _Network:
    """The addresses of a network as integers by family, from its document alone."""

    def __init__(self, document: Document) -> None:
        self.usable: dict[int, range] = {}
        self.gateways = {_number(document[name]) for name in ("gateway", "ipv6Gateway") if name in document}
        for version, member in ((4, "subnet"), (6, "ipv6Subnet")):
            if member in document:
                self.usable[version] = _usable(document[member])

    def is_large(self, version: int) -> bool:
        usable = self.usable[version]
        return usable.stop - usable.start >= LARGE  # len() cannot count a /64


@lru_cache(maxsize=10_000)
def _usable(text: str) -> range:
    """The usable host addresses of `address/length` or `first-last/length`, as integers."""
    span, _, length = text.rpartition("/")
    first, _, last = span.partition("-")
    subnet = ip_network(f"{first}/{length}", strict=False)
    low, high = (_number(first), _number(last)) if last else (int(subnet[0]), int(subnet[-1]))
    top = int(subnet[-1]) - (1 if subnet.version == 4 else 0)
    return range(max(low, int(subnet[0]) + 1), min(high, top) + 1)


class _Auditor:
    def __init__(self, entries: Mapping[str, bytes]) -> None:
        self._folders: defaultdict[str, dict[Key, Document]] = defaultdict(dict)
        for key, value in entries.items():
            folder, *parts = key.split("/")
            if folder not in {"alive", "leader", "restore"}:
                self._folders[folder][tuple(parts)] = json.loads(value)["o"]
        self._networks = {key: _Network(document) for key, document in self._folders["networks"].items()}
        claims = self._folders["claims"].items()
        self._claims = {key[1:]: document for key, document in claims if key[0] == "addresses"}

    def faults(self) -> Iterator[str]:
        yield from self._parents()
        yield from self._address_holders()
        yield from self._address_claims()
        yield from self._blocks()
        yield from self._numbers()

    def _parents(self) -> Iterator[str]:
        """Every object has its parent."""
        for folder in ("endpoints", "services", "groups"):
            for key, document in self._folders[folder].items():
                if (key[0], document["networkName"]) not in self._networks:
                    yield f"{folder} {key}: its network does not exist"
        for key, document in self._folders["endpoints"].items():
            group = document.get("serviceName")
            if group and (key[0], group) not in self._folders["groups"]:
                yield f"endpoint {key}: its group {group} does not exist"
        for key in self._folders["networks"]:
            if (key[0],) not in self._folders["tenants"]:
                yield f"network {key}: its tenant does not exist"

    def _held(self) -> Iterator[tuple[Key, str, str, Document]]:
        """(network, address, holder as claims name it, its document) for every address in use."""
        for key, document in self._folders["endpoints"].items():
            for member in ("ipAddress", "ipv6Address"):
                if member in document:
                    yield key[:2], document[member], f"endpoint:{':'.join(key)}", document
        for key, document in self._folders["services"].items():
            for member in ("vip", "ipv6Vip"):
                if member in document:
                    network = (key[0], document["networkName"])
                    yield network, document[member], f"serviceLB:{':'.join(key)}", document

    def _address_holders(self) -> Iterator[str]:
        """Every address in use has one holder that may use it, and is backed by a claim or by a block of its node."""
        seen: dict[tuple[Key, str], str] = {}
        for network, address, holder, document in self._held():
            if other := seen.get((network, address)):
                yield f"{address} of {network} is held by {holder} and by {other}"
            seen[network, address] = holder
            number, version = _number(address), _version(address)
            if network not in self._networks:
                continue
            if number not in self._networks[network].usable[version] or number in self._networks[network].gateways:
                yield f"{address} of {network} is held by {holder}, but it is not a usable address"
            yield from self._pool_faults(network, address, holder, document)
            claim = self._claims.get((*network, _hex(address)))
            block = self._block_of(network, address)
            if claim is None:
                if not block or not block.get("owner") or block["owner"] != document.get("homingHost"):
                    yield f"{address} of {network} is held by {holder}, without a claim and outside its node's blocks"
            elif claim["holder"] != holder:
                yield f"{address} of {network} is held by {holder}, but claimed by {claim['holder']}"

    def _pool_faults(self, network: Key, address: str, holder: str, document: Document) -> Iterator[str]:
        """Addresses of a group's pool are held by members of the group; members hold no other."""
        if _version(address) != 4:
            return
        own = document.get("serviceName", "") if holder.startswith("endpoint:") else ""
        for (tenant, name), group in self._folders["groups"].items():
            if (tenant, group["networkName"]) != network or "ipPool" not in group:
                continue
            first, _, last = group["ipPool"].partition("-")
            inside = _number(first) <= _number(address) <= _number(last or first)
            if inside != (name == own):
                yield f"{address} of {network} is held by {holder}, which violates the pool of group {name}"

    def _address_claims(self) -> Iterator[str]:
        """Every claim has its owner; in a large pool it lies in a shared block."""
        held = {(*network, _hex(address)): holder for network, address, holder, _ in self._held()}
        for key, claim in self._claims.items():
            network, address = key[:2], _address(key[2])
            if network not in self._networks:
                yield f"claim on {address} of {network}: the network does not exist"
                continue
            if not claim["holder"].startswith("reserved:") and held.get(key) != claim["holder"]:
                yield f"claim on {address} of {network}: its holder {claim['holder']} does not have it"
            if self._networks[network].is_large(_version(address)):
                block = self._block_of(network, address)
                if block is None or block.get("owner"):
                    yield f"claim on {address} of {network}: its block is {block}, not shared"

    def _block_of(self, network: Key, address: str) -> Document | None:
        """The block around an address: blocks start at multiples of their size, as subnets of that size do."""
        width = len(_hex(address))
        first = _number(address) // BLOCK * BLOCK
        return self._folders["blocks"].get((*network, f"{first:0{width}x}"))

    def _blocks(self) -> Iterator[str]:
        """Blocks exist in large pools only; a node's own block has only usable addresses."""
        for key, document in self._folders["blocks"].items():
            network, address = key[:2], _address(key[2])
            if network not in self._networks:
                yield f"block {address} of {network}: the network does not exist"
                continue
            version, first = _version(address), _number(address)
            if not self._networks[network].is_large(version):
                yield f"block {address} of {network}: the pool is too small for blocks"
            if document.get("owner"):
                usable = self._networks[network].usable[version]
                if first not in usable or first + BLOCK - 1 not in usable:
                    yield f"block {address} of {network} is {document['owner']}'s, but contains unusable addresses"
                if (document["owner"],) not in self._folders["nodes"]:
                    yield f"block {address} of {network} is {document['owner']}'s, which does not exist"

    def _numbers(self) -> Iterator[str]:
        """Every tag and ID has one existing holder, and every holder has its claim."""
        expected: dict[Key, str] = {}
        for key, number, holder in self._numbered():
            if (key, number) in expected:
                yield f"{key} {number} is held by {holder} and by {expected[key, number]}"
            expected[key, number] = holder
        claimed = {key: claim["holder"] for key, claim in self._folders["claims"].items() if key[0] != "addresses"}
        for pair in sorted(expected.keys() | claimed.keys()):
            if expected.get(pair) != claimed.get(pair):
                yield f"{pair} is held by {expected.get(pair)}, but claimed by {claimed.get(pair)}"

    def _numbered(self) -> Iterator[tuple[str, str, str]]:
        for key, document in self._folders["networks"].items():
            holder, tags = f"network:{':'.join(key)}", document["tags"]
            if document["encap"] == "vlan":
                yield "vlan", str(tags["vlan"]), holder
            else:
                yield "vni", str(tags["vni"]), holder
                yield "local-vlan", str(tags["vlan"]), holder
        for key, document in self._folders["groups"].items():
            holder = f"endpointGroup:{':'.join(key)}"
            yield "group-id", str(document["groupId"]), holder
            if "pktTag" in document:
                yield "vlan", str(document["pktTag"]), holder


@lru_cache(maxsize=10_000)
def _number(address: str) -> int:
    return int(ip_address(address))


@lru_cache(maxsize=10_000)
def _hex(address: str) -> str:
    return ip_address(address).packed.hex()


@lru_cache(maxsize=10_000)
def _address(text: str) -> str:
    return str(ip_address(bytes.fromhex(text)))


def _version(address: str) -> int:
    return 6 if ":" in address else 4
