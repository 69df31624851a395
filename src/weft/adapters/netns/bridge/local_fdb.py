"""Who of this node is on segments, and that news about others leave them alone.

An address may come to this node before the news that another one gave it up: where a workload of ours is, the kernel
has it from us, and an older entry that goes does not take ours along.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from weft.adapters.netns.kernel_state import KernelState, segment_name
from weft.domain.addresses import Address
from weft.domain.desired.state import Port


class LocalFdb:
    """See the module."""

    def __init__(self, ports: Iterable[Port] = (), indexes: Mapping[str, int] | None = None) -> None:
        self._macs: set[str] = set()
        self._addresses: set[tuple[int, Address]] = set()
        for port in ports:
            self.add(port, indexes or {})

    def add(self, port: Port, indexes: Mapping[str, int]) -> None:
        if port.segment:
            self._macs.add(port.mac)
            self._addresses |= _addresses(port, indexes)

    def discard(self, port: Port, indexes: Mapping[str, int]) -> None:
        if port.segment:
            self._macs.discard(port.mac)
            self._addresses -= _addresses(port, indexes)

    def spared(self, facts: KernelState) -> KernelState:
        """The facts without those that speak of ours."""
        if not self._macs:
            return facts
        return msgspec.structs.replace(
            facts,
            routes=frozenset(each for each in facts.routes if (each.link, each.to.address) not in self._addresses),
            neighbours=frozenset(each for each in facts.neighbours if (each.link, each.address) not in self._addresses),
            forwardings=frozenset(each for each in facts.forwardings if each.remote or each.mac not in self._macs),
        )


def _addresses(port: Port, indexes: Mapping[str, int]) -> set[tuple[int, Address]]:
    bridge = indexes.get(segment_name(port.segment), 0)
    return {(bridge, address) for address in port.addresses}
