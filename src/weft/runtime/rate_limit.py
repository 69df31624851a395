"""Token buckets by source: how many requests each client may send."""

from __future__ import annotations

from collections import OrderedDict
from ipaddress import IPv6Address, ip_address

# Clients of this machine: loopback and unix sockets.
LOCAL = "local"

# Sources that are remembered, some 200 bytes each. A forgotten one begins with a full bucket.
_MAX_SOURCES = 4096


def source_of(host: str) -> str:
    """The source that a peer address counts for: `LOCAL`, an IPv4 address, or the /64 of an IPv6 address."""
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return LOCAL  # a unix socket
    if address.is_loopback:
        return LOCAL
    # One machine may use any address of its /64.
    if isinstance(address, IPv6Address):
        return f"{IPv6Address(int(address) >> 64 << 64)}/64"
    return str(address)


class TokenBuckets:
    """A bucket for each source: it refills at `rate` a second and holds a `burst`."""

    def __init__(self, *, rate: float, burst: float) -> None:
        self.rate = rate
        self._burst = burst
        # Tokens left and when that was, the least recently used source first.
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, source: str, *, now: float, weight: float = 1.0) -> float:
        """Take a token: 0, or the seconds until there is one. A source of `weight` 10 may send ten times as much."""
        tokens, since = self._left.pop(source, (self._burst, now))
        tokens = min(self._burst, tokens + (now - since) * self.rate)
        cost = 1.0 / weight
        wait = 0.0 if tokens >= cost else (cost - tokens) / self.rate
        self._left[source] = (tokens if wait else tokens - cost, now)
        if len(self._left) > _MAX_SOURCES:
            self._left.popitem(last=False)
        return wait
