"""Who is asked about the outside: resolvers that were named, or those of the machine."""

from __future__ import annotations

from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple

DNS_PORT = 53
# As many as the C library reads.
_MOST_SERVERS = 3


class Upstream(NamedTuple):
    """A resolver."""

    host: str
    port: int = DNS_PORT


class Upstreams:
    """The resolvers, in order. The machine's are read again whenever their file has changed."""

    def __init__(self, named: tuple[Upstream, ...], *, file: Path) -> None:
        self._named = named
        self._file = file
        self._seen: tuple[int, ...] = ()
        self._read: tuple[Upstream, ...] = ()

    def current(self) -> tuple[Upstream, ...]:
        """Those to be asked now; none when the machine has none."""
        if self._named:
            return self._named
        try:
            status = self._file.stat()
            seen = (status.st_ino, status.st_mtime_ns, status.st_size)
            if seen != self._seen:
                self._read = parse_resolv_conf(self._file.read_text(errors="replace"))
                self._seen = seen
        except FileNotFoundError:
            self._seen, self._read = (), ()
        return self._read

    def addresses(self) -> tuple[str, ...]:
        """Where those are, in the form that rules know: without a scope, and IPv4 as itself."""
        found = (ip_address(each.host.partition("%")[0]) for each in self.current())
        return tuple(str(each.ipv4_mapped or each if each.version == 6 else each) for each in found)


def parse_resolv_conf(text: str) -> tuple[Upstream, ...]:
    """The name servers of a resolv.conf(5). What is no address is passed over, as the C library does."""
    found: list[Upstream] = []
    for line in text.splitlines():
        match line.split():
            case ["nameserver", host, *_] if _is_address(host):
                found.append(Upstream(host))
    return tuple(found[:_MOST_SERVERS])


def _is_address(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return False
    return True
