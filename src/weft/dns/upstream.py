"""Upstream resolvers: those that were configured, or those of the machine's resolv.conf."""

from __future__ import annotations

from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple

DNS_PORT = 53
# glibc's MAXNS: it reads three name servers and ignores the rest.
_MAXNS = 3


class Upstream(NamedTuple):
    """A resolver."""

    host: str
    port: int = DNS_PORT


class Upstreams:
    """The resolvers, in order. resolv.conf is read again whenever it has changed."""

    def __init__(self, configured: tuple[Upstream, ...], *, file: Path) -> None:
        self._configured = configured
        self._file = file
        self._version: tuple[int, ...] = ()
        self._read: tuple[Upstream, ...] = ()

    def current(self) -> tuple[Upstream, ...]:
        """The resolvers to query now; none when the machine has none."""
        if self._configured:
            return self._configured
        try:
            status = self._file.stat()
            # The inode too: resolvers are often set by renaming a new file over the old one, of the same size.
            version = (status.st_ino, status.st_mtime_ns, status.st_size)
            if version != self._version:
                self._read = parse_resolv_conf(self._file.read_text(errors="replace"))
                self._version = version
        except OSError:  # absent, or not readable now
            self._version, self._read = (), ()
        return self._read

    def addresses(self) -> tuple[str, ...]:
        """Their addresses in the form that policy uses: without a zone id, and v4-mapped ones as IPv4."""
        found = (ip_address(upstream.host.partition("%")[0]) for upstream in self.current())
        return tuple(str(each.ipv4_mapped or each if each.version == 6 else each) for each in found)


def parse_resolv_conf(text: str) -> tuple[Upstream, ...]:
    """The name servers of a resolv.conf(5). Invalid addresses are skipped, as the C library does."""
    found: list[Upstream] = []
    for line in text.splitlines():
        match line.split():
            case ["nameserver", host, *_] if _is_address(host):
                found.append(Upstream(host))
    return tuple(found[:_MAXNS])


def _is_address(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return False
    return True
