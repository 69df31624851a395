"""Text forms of protocols and ports."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.domain.errors import Invalid
from weft.domain.policy.model.protocols import parse_service, protocol_name, protocol_number, service_name


@pytest.mark.parametrize(
    ("text", "service"),
    [
        ("tcp/80", (6, 80)),
        ("TCP/80", (6, 80)),
        ("udp/53", (17, 53)),
        ("sctp/65535", (132, 65535)),
        ("6/1", (6, 1)),
        ("icmp", (1, 0)),
        ("icmpv6", (58, 0)),
        ("ip/47", (47, 0)),
        ("ip/0", (0, 0)),
        ("ip/255", (255, 0)),
    ],
)
def test_services(text: str, service: tuple[int, int]) -> None:
    assert parse_service(text) == service


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("tcp", "port"),
        ("tcp/", "port"),
        ("tcp/0", "port"),
        ("tcp/65536", "port"),
        ("tcp/70000", "port"),
        ("tcp/-1", "port"),
        ("tcp/http", "port"),
        ("tcp/²", "port"),
        ("icmp/8", "port"),
        ("47/1", "port"),
        ("80", "service"),  # UX3: a port without protocol, not IP protocol 80
        ("256", "service"),
        ("999999999999", "service"),
        ("ip/256", "protocol"),
        ("ip/6", "port"),
        ("ip/", "protocol"),
        ("80/tcp", "port"),
        ("²", "protocol"),
        ("-1", "protocol"),
        ("", "protocol"),
        ("/80", "protocol"),
        ("http/80", "protocol"),
    ],
)
def test_an_invalid_service_is_rejected_with_its_field(text: str, field: str) -> None:
    with pytest.raises(Invalid) as refusal:
        parse_service(text)
    assert refusal.value.field == field


@given(st.integers(0, 255), st.integers(1, 65535))
def test_formatted_services_parse_back(protocol: int, port: int) -> None:
    assert protocol_number(protocol_name(protocol)) == protocol
    read, read_port = parse_service(service_name(protocol, port))
    assert read == protocol
    assert read_port in (port, 0)
