"""One result, written and read in the shape of every version."""

from __future__ import annotations

import json
from dataclasses import replace
from ipaddress import ip_address, ip_interface, ip_network
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.cni.errors import CniError, Code
from weft.cni.result import Address, Dns, Interface, Result, Route, encode_result, parse_result
from weft.cni.versions import SUPPORTED, SpecVersion

V = SpecVersion
OF_LISTS = [version for version in SUPPORTED if version >= V.V0_3_0]

FULL = Result(
    interfaces=(
        Interface(name="wh1a2b3c", mac="02:00:00:00:00:01"),
        Interface(
            name="eth0",
            mac="02:00:00:00:00:02",
            sandbox="/run/netns/a",
            mtu=1450,
            socket_path="/run/s.sock",
            pci_id="0000:00:1f.6",
        ),
    ),
    addresses=(
        Address(address=ip_interface("10.1.0.5/24"), gateway=ip_address("10.1.0.1"), interface=1),
        Address(address=ip_interface("10.2.0.5/24"), interface=0),
        Address(address=ip_interface("fd00::5/64"), gateway=ip_address("fd00::1"), interface=1),
    ),
    routes=(
        Route(target=ip_network("0.0.0.0/0"), gateway=ip_address("10.1.0.1")),
        Route(target=ip_network("10.9.0.0/16"), mtu=1400, advmss=1360, priority=7, table=0, scope=253),
        Route(target=ip_network("::/0"), gateway=ip_address("fd00::1"), scope=0),
    ),
    dns=Dns(nameservers=("10.1.0.2",), domain="a.example", search=("b.example",), options=("ndots:2",)),
)


def encoded(result: Result, version: SpecVersion) -> dict[str, Any]:
    stdout = encode_result(result, version)
    assert stdout.endswith(b"\n")
    members: dict[str, Any] = json.loads(stdout)
    return members


@pytest.mark.parametrize("version", SUPPORTED)
def test_the_answer_names_the_version_asked_for(version: SpecVersion) -> None:
    """C-043."""
    assert encoded(FULL, version)["cniVersion"] == version


@pytest.mark.parametrize("version", [V.V0_1_0, V.V0_2_0])
def test_the_first_versions_have_one_address_of_each_family(version: SpecVersion) -> None:
    """C-130, P-03: the first address of a family counts; routes go under their family."""
    assert encoded(FULL, version) == {
        "cniVersion": version,
        "ip4": {
            "ip": "10.1.0.5/24",
            "gateway": "10.1.0.1",
            "routes": [{"dst": "0.0.0.0/0", "gw": "10.1.0.1"}, {"dst": "10.9.0.0/16"}],
        },
        "ip6": {"ip": "fd00::5/64", "gateway": "fd00::1", "routes": [{"dst": "::/0", "gw": "fd00::1"}]},
        "dns": {
            "nameservers": ["10.1.0.2"],
            "domain": "a.example",
            "search": ["b.example"],
            "options": ["ndots:2"],
        },
    }


@pytest.mark.parametrize("version", [V.V0_1_0, V.V0_2_0])
def test_the_first_versions_need_an_address(version: SpecVersion) -> None:
    """P-13."""
    with pytest.raises(CniError) as refused:
        encode_result(Result(interfaces=FULL.interfaces), version)
    assert refused.value.code == Code.INCOMPATIBLE_VERSION


@pytest.mark.parametrize("version", OF_LISTS)
def test_later_versions_have_lists(version: SpecVersion) -> None:
    """C-045, C-130, P-03: `version` in addresses before 1.0.0, MTU and the like only in 1.1.0."""
    members = encoded(FULL, version)
    assert [each.get("version") for each in members["ips"]] == (
        ["4", "4", "6"] if version < V.V1_0_0 else [None, None, None]
    )
    assert members["interfaces"][0] == {"name": "wh1a2b3c", "mac": "02:00:00:00:00:01"}
    newer = {"mtu": 1450, "socketPath": "/run/s.sock", "pciID": "0000:00:1f.6"}
    assert members["interfaces"][1] == {"name": "eth0", "mac": "02:00:00:00:00:02", "sandbox": "/run/netns/a"} | (
        newer if version >= V.V1_1_0 else {}
    )
    newer = {"mtu": 1400, "advmss": 1360, "priority": 7, "table": 0, "scope": 253}
    assert members["routes"][1] == {"dst": "10.9.0.0/16"} | (newer if version >= V.V1_1_0 else {})


@pytest.mark.parametrize("version", OF_LISTS)
def test_an_index_is_kept_even_when_it_is_0(version: SpecVersion) -> None:
    """C-046."""
    assert [each.get("interface") for each in encoded(FULL, version)["ips"]] == [1, 0, 1]
    without = Result(addresses=(Address(address=ip_interface("10.1.0.5/24")),))
    assert "interface" not in encoded(without, version)["ips"][0]


@pytest.mark.parametrize("version", SUPPORTED)
def test_what_is_empty_is_left_out(version: SpecVersion) -> None:
    """C-133."""
    result = Result(addresses=(Address(address=ip_interface("fd00::5/64")),))
    assert set(encoded(result, version)) == {"cniVersion", "ip6" if version < V.V0_3_0 else "ips"}


ADDRESSES = st.ip_addresses().flatmap(
    lambda ip: st.integers(0, ip.max_prefixlen).map(lambda length: ip_interface(f"{ip}/{length}"))
)
NETWORKS = ADDRESSES.map(lambda interface: interface.network)
MAYBE = st.none() | st.integers(0, 2**32)
WORDS = st.text(min_size=1, max_size=20)
RESULTS = st.builds(
    Result,
    interfaces=st.lists(
        st.builds(Interface, name=WORDS, mac=st.text(), sandbox=st.text(), mtu=MAYBE, socket_path=st.text()),
        min_size=1,
        max_size=3,
    ).map(tuple),
    addresses=st.lists(
        st.builds(
            Address, address=ADDRESSES, gateway=st.none() | st.ip_addresses(), interface=st.sampled_from([None, 0])
        ),
        max_size=3,
    ).map(tuple),
    routes=st.lists(
        st.builds(
            Route, target=NETWORKS, gateway=st.none() | st.ip_addresses(), mtu=MAYBE, priority=MAYBE, scope=MAYBE
        ),
        max_size=3,
    ).map(tuple),
    dns=st.builds(Dns, nameservers=st.lists(WORDS).map(tuple), domain=st.text(), options=st.lists(WORDS).map(tuple)),
)


@given(result=RESULTS)
def test_the_newest_version_expresses_everything(result: Result) -> None:
    """C-131, C-132, C-044: read and written again it is the same."""
    assert parse_result(json.loads(encode_result(result, V.V1_1_0)), version=V.V0_1_0) == result


@given(result=RESULTS, version=st.sampled_from(OF_LISTS))
def test_each_version_of_lists_loses_only_what_it_cannot_tell(result: Result, version: SpecVersion) -> None:
    """C-132: the round trip of a version's own result is lossless."""
    once = encode_result(result, version)
    parsed = parse_result(json.loads(once), version=V.V0_1_0)
    assert encode_result(parsed, version) == once
    assert [each.address for each in parsed.addresses] == [each.address for each in result.addresses]


@pytest.mark.parametrize("version", SUPPORTED)
def test_old_results_become_new_ones_without_loss(version: SpecVersion) -> None:
    """C-131: up-conversion."""
    parsed = parse_result(json.loads(encode_result(FULL, version)), version=version)
    again = parse_result(json.loads(encode_result(parsed, V.V1_1_0)), version=version)
    assert again == parsed
    assert replace(parsed.routes[0]) == FULL.routes[0]
    assert parsed.dns == FULL.dns


def test_a_result_without_version_is_of_the_version_of_its_configuration() -> None:
    """C-120."""
    assert parse_result({"ip4": {"ip": "10.1.0.5/24"}}, version=V.V0_2_0).addresses
    assert not parse_result({"ip4": {"ip": "10.1.0.5/24"}}, version=V.V1_0_0).addresses
    assert parse_result({"cniVersion": "0.2.0", "ip4": {"ip": "10.1.0.5/24"}}, version=V.V1_0_0).addresses


@pytest.mark.parametrize(
    "members",
    [
        {"ips": [{"address": "10.1.0.5"}]},
        {"ips": [{"address": "10.1.0.5/33"}]},
        {"ips": [{}]},
        {"ips": {}},
        {"ips": [7]},
        {"ips": [{"address": "10.1.0.5/24", "gateway": "here"}]},
        {"ips": [{"address": "10.1.0.5/24", "interface": 0}]},
        {"interfaces": [{"name": "a"}], "ips": [{"address": "10.1.0.5/24", "interface": 1}]},
        {"interfaces": [{"name": "a"}], "ips": [{"address": "10.1.0.5/24", "interface": -1}]},
        {"interfaces": [{"name": 7}]},
        {"interfaces": [{"name": "a", "mtu": "1500"}]},
        {"interfaces": [{"name": "a", "mtu": True}]},
        {"routes": [{"dst": "everywhere"}]},
        {"routes": [{}]},
        {"dns": {"nameservers": "10.1.0.2"}},
        {"dns": []},
    ],
)
def test_what_is_no_result_is_code_7_and_says_where(members: dict[str, object]) -> None:
    """P-23: an index that points nowhere is refused too."""
    with pytest.raises(CniError) as refused:
        parse_result(members, version=V.V1_0_0, where="prevResult")
    assert refused.value.code == Code.BAD_CONFIG
    assert "prevResult." in refused.value.message


def test_members_that_are_null_are_absent() -> None:
    """Go programs write null for what is empty."""
    assert parse_result({"ips": None, "interfaces": None, "dns": None}, version=V.V1_0_0) == Result()
