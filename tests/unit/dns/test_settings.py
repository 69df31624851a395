"""netdns's flags and variables."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft.dns.settings import read_dns_settings
from weft.dns.upstream import Upstream
from weft.runtime.settings import BadSettings


def test_defaults() -> None:
    settings = read_dns_settings([], {})
    assert settings.run_dir == Path("/run/weft")
    assert settings.socket == Path("/run/weft/dns.sock")
    assert read_dns_settings(["--run-dir", "/srv/run"], {}).socket == Path("/srv/run/dns.sock")
    assert (settings.domain, settings.upstreams, settings.ttl) == ("cluster.local", (), 30)


def test_flags_and_variables() -> None:
    settings = read_dns_settings(
        ["--upstreams", "192.0.2.1,[2001:db8::1]:5353,2001:db8::2,127.0.0.1:53", "--domain", "Example.Org."],
        {"CONTIV_NETDNS_TTL": "0", "CONTIV_NETDNS_DOMAIN": "other"},
    )
    assert settings.upstreams == (
        Upstream("192.0.2.1"),
        Upstream("2001:db8::1", 5353),
        Upstream("2001:db8::2"),
        Upstream("127.0.0.1", 53),
    )
    assert (settings.domain, settings.ttl) == ("example.org", 0)


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--upstreams", "resolver.example.org"),
        ("--upstreams", "resolver.example.org:53"),
        ("--upstreams", "192.0.2.1,"),
        ("--domain", "a..b"),
        ("--domain", "."),
        ("--ttl", "-1"),
        ("--ttl", "86401"),
        ("--datapath", "none"),
    ],
)
def test_an_invalid_value_names_its_flag(flag: str, value: str) -> None:
    with pytest.raises(BadSettings, match=flag):
        read_dns_settings([flag, value], {})
