"""Each object by itself: its normal form, or the member at fault (contiv 2.2). REST's own tests have the long lists."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.fake_cluster import endpoint, group, network, policy, profile, rule, service

from weft.domain import kinds, model
from weft.domain.addresses import Range, parse_address
from weft.domain.errors import Invalid
from weft.domain.ids import NodeName
from weft.domain.validation import check, check_text, parse_rule_address, parse_tag_range

BGP = model.BgpPeer(hostname=NodeName("n1"), router_ip="50.1.1.2/24", as_number="65002", neighbor_as="500")


@pytest.mark.parametrize(
    "value",
    [network(), group(ip_pool="10.1.1.1-10.1.1.9"), policy(), rule(), profile(), service(), BGP, model.Global(),
     endpoint("e1"), model.Node(name=NodeName("n1"))],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_good_values_are_given_back(value: model.Value) -> None:
    assert check(value) == value
    assert check(check(value)) == check(value)


def test_every_kind_can_be_checked() -> None:
    for kind in kinds.ALL:
        with pytest.raises(Invalid):
            empty = {field.encode_name: "" for field in msgspec.structs.fields(kind.type) if field.required} | (
                {"name": "x"} if kind is kinds.GLOBAL else {}
            )
            check(msgspec.convert(_complete(empty), kind.type))


def _complete(members: dict[str, str]) -> dict[str, object]:
    """Words for the members that have only a few, and what is nested."""
    words = {"encap": "vlan", "direction": "in", "action": "deny", "service": {}, "slice": {"addressType": "IPv4"}}
    return {name: words.get(name, text) for name, text in members.items()}


class TestNetwork:
    def test_addresses_get_their_one_spelling(self) -> None:
        wanted = network(subnet="10.1.1.77/24", ipv6_subnet="2016:0430::0/64", ipv6_gateway="2016:430:0::0001")
        shown = check(wanted)
        assert (shown.subnet, shown.ipv6_subnet, shown.ipv6_gateway) == ("10.1.1.0/24", "2016:430::/64", "2016:430::1")

    @pytest.mark.parametrize(("encap", "highest"), [("vlan", 4094), ("vxlan", (1 << 24) - 1)])
    def test_tags_are_bounded_by_the_encap(self, encap: str, highest: int) -> None:
        for tag in (0, 1, highest):
            assert check(network(encap=encap, pkt_tag=tag)).pkt_tag == tag
        for tag in (-1, highest + 1):
            with pytest.raises(Invalid) as caught:
                check(network(encap=encap, pkt_tag=tag))
            assert caught.value.field == "pktTag"

    @pytest.mark.parametrize(
        ("subnet", "gateway", "good"),
        [
            ("10.1.1.0/24", "10.1.1.1", True),
            ("10.1.1.0/24", "10.1.1.254", True),
            ("10.1.1.0/24", "10.1.1.0", False),
            ("10.1.1.0/24", "10.1.1.255", False),
            ("10.1.1.0/24", "10.1.2.1", False),
            ("10.1.1.10-10.1.1.20/24", "10.1.1.1", True),
            ("10.1.1.0/31", "10.1.1.1", False),
        ],
    )
    def test_a_gateway_is_a_host_of_the_subnet(self, subnet: str, gateway: str, good: bool) -> None:
        if good:
            assert check(network(subnet=subnet, gateway=gateway)).gateway == gateway
        else:
            with pytest.raises(Invalid) as caught:
                check(network(subnet=subnet, gateway=gateway))
            assert caught.value.field == "gateway"

    def test_a_v6_gateway_needs_its_subnet(self) -> None:
        with pytest.raises(Invalid) as caught:
            check(network(ipv6_gateway="fd00::1"))
        assert caught.value.field == "ipv6Gateway"


class TestGroup:
    def test_a_pool_of_one_address(self) -> None:
        """W20."""
        assert check(group(ip_pool="10.1.1.9")).ip_pool == "10.1.1.9"
        assert check(group(ip_pool="10.1.1.9-10.1.1.9")).ip_pool == "10.1.1.9"

    def test_a_policy_is_named_once(self) -> None:
        assert check(group(policies=("p", "q"))).policies == ("p", "q")
        with pytest.raises(Invalid) as caught:
            check(group(policies=("p", "q", "p")))
        assert caught.value.field == "policies"


class TestRule:
    @pytest.mark.parametrize("protocol", ["", "tcp", "udp", "icmp", "sctp", "0", "58", "255"])
    def test_good_protocols(self, protocol: str) -> None:
        assert check(rule(protocol=protocol)).protocol == protocol

    @pytest.mark.parametrize("protocol", ["TCP", "256", "-1", "1000", "tcp\n", "٦"])
    def test_bad_protocols(self, protocol: str) -> None:
        with pytest.raises(Invalid) as caught:
            check(rule(protocol=protocol))
        assert caught.value.field == "protocol"

    @pytest.mark.parametrize("protocol", ["tcp", "udp", "sctp", "6", "17", "132"])
    def test_a_port_needs_a_protocol_that_has_ports(self, protocol: str) -> None:
        assert check(rule(protocol=protocol, port=65535)).port == 65535
        for odd in ("", "icmp", "1"):
            with pytest.raises(Invalid) as caught:
                check(rule(protocol=odd, port=80))
            assert caught.value.field == "port"

    @pytest.mark.parametrize(
        ("text", "first", "last"),
        [
            ("10.1.1.5", "10.1.1.5", "10.1.1.5"),
            ("10.1.1.5-9", "10.1.1.5", "10.1.1.9"),
            ("10.1.1.5-5", "10.1.1.5", "10.1.1.5"),
            ("10.1.1.5/24", "10.1.1.0", "10.1.1.255"),
            ("10.1.1.5/32", "10.1.1.5", "10.1.1.5"),
            ("0.0.0.0/0", "0.0.0.0", "255.255.255.255"),
            ("fd00::5", "fd00::5", "fd00::5"),
            ("fd00::/127", "fd00::", "fd00::1"),
        ],
    )
    def test_addresses_of_rules(self, text: str, first: str, last: str) -> None:
        low, high = (parse_address(each, field="x") for each in (first, last))
        assert parse_rule_address(text, field="x") == Range(low.family, low.number, high.number)

    @pytest.mark.parametrize(
        "text",
        ["10.1.1.9-5", "10.1.1.5-256", "10.1.1.5-10.1.1.9", "10.1.1.5-", "10.1.1.5-1٩", "10.1.1.0/33", "10.1.1.5-9/24",
         "fd00::-5", "fd00::/129", "10.1.1/24", "/24", "10.1.1.0/024"],
    )  # fmt: skip
    def test_bad_addresses_of_rules(self, text: str) -> None:
        with pytest.raises(Invalid):
            parse_rule_address(text, field="x")


class TestService:
    def test_every_port_is_checked_and_spelled_alike(self) -> None:
        """W21: the original checked the first one, and its datapath ignored protocols in lower case."""
        shown = check(service(ports=("80:8080:tcp", "0053:53:Udp", "53:53:TCP")))
        assert shown.ports == ("80:8080:TCP", "53:53:UDP", "53:53:TCP")

    @pytest.mark.parametrize(
        "entry", ["", "80", "80:81", "80:81:TCP:1", "80:81:SCTP", "0:80:TCP", "80:65536:TCP", ":80:TCP", "x:80:TCP"]
    )
    def test_a_bad_port_is_found_at_any_place(self, entry: str) -> None:
        for ports in ((entry,), ("80:8080:TCP", entry), (entry, "80:8080:TCP")):
            with pytest.raises(Invalid) as caught:
                check(service(ports=ports))
            assert caught.value.field == "ports"


class TestTagRanges:
    @given(st.integers(-5, 5000), st.integers(-5, 5000))
    def test_a_range_runs_upwards_within_its_bounds(self, first: int, last: int) -> None:
        text = f"{first}-{last}"
        if 1 <= first <= last <= 4094:
            assert parse_tag_range(text, field="vlans", highest=4094, widest=4094) == (first, last)
        else:
            with pytest.raises(Invalid) as caught:
                parse_tag_range(text, field="vlans", highest=4094, widest=4094)
            assert caught.value.field == "vlans"

    def test_a_range_is_not_too_wide(self) -> None:
        assert parse_tag_range("1-16000", field="x", highest=1 << 24, widest=16000) == (1, 16000)
        with pytest.raises(Invalid, match="wider"):
            parse_tag_range("1-16001", field="x", highest=1 << 24, widest=16000)

    @pytest.mark.parametrize("text", ["", "1", "1-", "-1", "1-2-3", "a-b", "1 - 2", "1-2\n", "١-2", "1-123456789"])
    def test_what_is_no_range(self, text: str) -> None:
        with pytest.raises(Invalid):
            parse_tag_range(text, field="x", highest=1 << 24, widest=1 << 24)


@given(st.text(max_size=10))
def test_text_from_outside_can_be_printed(text: str) -> None:
    if text.isprintable():
        assert check_text(text, field="x") == text
    else:
        with pytest.raises(Invalid):
            check_text(text, field="x")


def test_text_from_outside_is_bounded() -> None:
    assert check_text("a" * 2048, field="x")
    with pytest.raises(Invalid, match="2048"):
        check_text("a" * 2049, field="x")


@pytest.mark.parametrize("member", ["container_id", "container_name"])
def test_labels_and_container_names_are_text(member: str) -> None:
    for odd in ({member: "a\x07"}, {"labels": {"a\n": "b"}}, {"labels": {"a": "b\0"}}):
        with pytest.raises(Invalid):
            check(msgspec.structs.replace(endpoint("e1"), **odd))
