"""Upstream resolvers, configured or from resolv.conf."""

from __future__ import annotations

import os
from pathlib import Path

from weft.dns.upstream import Upstream, Upstreams, parse_resolv_conf


def test_resolv_conf_is_read_as_the_c_library_does() -> None:
    text = """
        # nameserver 192.0.2.9
        search example.org
        nameserver 192.0.2.1
        nameserver\tfe80::1%eth0 trailing
        nameserver resolver.example.org
        nameserver
        nameserver 127.0.0.53
        nameserver 192.0.2.4
    """
    assert parse_resolv_conf(text) == (Upstream("192.0.2.1"), Upstream("fe80::1%eth0"), Upstream("127.0.0.53"))


def test_the_file_is_read_again_when_it_has_changed(tmp_path: Path) -> None:
    file = tmp_path / "resolv.conf"
    upstreams = Upstreams((), file=file)
    assert upstreams.current() == ()
    for number in (1, 2):
        fresh = tmp_path / "new"
        fresh.write_text(f"nameserver 192.0.2.{number}\n")
        os.utime(fresh, (number, number))
        fresh.replace(file)
        assert upstreams.current() == (Upstream(f"192.0.2.{number}"),)
    file.unlink()
    assert upstreams.current() == ()


def test_configured_upstreams_replace_those_of_the_machine(tmp_path: Path) -> None:
    configured = (Upstream("192.0.2.7", 5353),)
    assert Upstreams(configured, file=tmp_path / "none").current() == configured
