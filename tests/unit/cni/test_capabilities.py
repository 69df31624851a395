"""What callers ask for, in the words of containerd, podman, Mesos and the conventions."""

from __future__ import annotations

from ipaddress import ip_address

import pytest

from weft.cni.arguments import parse_arguments
from weft.cni.capabilities import CAPABILITIES, Capabilities, parse_wishes
from weft.cni.errors import CniError, Code
from weft.cni.json_reader import Document
from weft.cni.portmap_bandwidth import Bandwidth, PortMapping
from weft.cni.result import Dns

ONE, TWO, THREE = (ip_address(f"10.1.0.{last}") for last in (1, 2, 3))


def wishes(config: dict[str, object], args: str = "") -> Capabilities:
    return parse_wishes(Document(config), parse_arguments(args, refuse_unknown=True), network="blue")


def refusal(config: dict[str, object], args: str = "") -> CniError:
    with pytest.raises(CniError) as refused:
        wishes(config, args)
    return refused.value


def test_nothing_asked_is_nothing_wished() -> None:
    assert wishes({}) == Capabilities(labels={}, annotations={})


PORTS_OF_CONTAINERD = [{"HostPort": 18081, "ContainerPort": 8081, "Protocol": "tcp", "HostIP": "10.200.0.11"}]
PORTS_OF_PODMAN = [{"hostPort": 80, "containerPort": 8080, "protocol": "udp", "hostIP": ""}]
RATES_OF_CONTAINERD = {"IngressRate": 10_000_000, "IngressBurst": 4_294_967_295, "EgressRate": 0, "EgressBurst": 0}


def test_ports_of_the_host_are_declared_and_read() -> None:
    """P-51: names of members come in any case."""
    assert "portMappings" in CAPABILITIES
    assert wishes({"runtimeConfig": {"portMappings": PORTS_OF_CONTAINERD + PORTS_OF_PODMAN}}).ports == (
        PortMapping(protocol="tcp", host_port=18081, container_port=8081, host_ip=ip_address("10.200.0.11")),
        PortMapping(protocol="udp", host_port=80, container_port=8080),
    )


def test_rates_are_declared_and_read() -> None:
    """P-52: a burst without a rate asks for nothing."""
    assert "bandwidth" in CAPABILITIES
    assert wishes({"runtimeConfig": {"bandwidth": RATES_OF_CONTAINERD}}).bandwidth == Bandwidth(
        ingress_rate=10_000_000, ingress_burst=4_294_967_295
    )


def test_loopback_leads_to_a_container_where_the_kernel_can_do_it() -> None:
    """Of v6 it cannot; what of v4 it opens, and to whom, is tried with packets (CVE-2020-8558)."""
    port = {"hostPort": 1, "containerPort": 1}
    (asked,) = wishes({"runtimeConfig": {"portMappings": [{**port, "hostIP": "127.0.0.1"}]}}).ports
    assert str(asked.host_ip) == "127.0.0.1"
    refused = refusal({"runtimeConfig": {"portMappings": [{**port, "hostIP": "::1"}]}})
    assert refused.code == Code.UNSUPPORTED_FIELD


@pytest.mark.parametrize(
    "runtime",
    [
        {"portMappings": []},
        {"portMappings": None},
        {"bandwidth": {}},
        {"bandwidth": dict.fromkeys(RATES_OF_CONTAINERD, 0)},
        {"bandwidth": {"ingressBurst": 4_294_967_295}},
    ],
)
def test_no_ports_and_no_rates_are_no_wish(runtime: dict[str, object]) -> None:
    assert wishes({"runtimeConfig": runtime}) == wishes({})


def test_containerd_hands_over_annotations() -> None:
    """cni 5."""
    runtime = {"io.kubernetes.cri.pod-annotations": {"orch/net": "green"}}
    assert dict(wishes({"runtimeConfig": runtime}).annotations) == {"orch/net": "green"}


def test_podman_writes_aliases_by_network() -> None:
    """cni 5."""
    runtime = {"aliases": {"blue": ["al1", "0123456789ab"], "red": ["other"]}}
    assert wishes({"runtimeConfig": runtime}).aliases == ("al1", "0123456789ab")


def test_aliases_may_be_a_list() -> None:
    """cni 3."""
    assert wishes({"runtimeConfig": {"aliases": ["web", "web_1"]}}).aliases == ("web", "web_1")


def test_addresses_come_from_the_strongest_source() -> None:
    """P-45, cni 3: the runtime's word, then `args`, then CNI_ARGS; a prefix may follow and does not count."""
    runtime, args = {"ips": ["10.1.0.1/24"]}, {"cni": {"ips": ["10.1.0.2"]}}
    assert wishes({"runtimeConfig": runtime, "args": args}, "IP=10.1.0.3").addresses == (ONE,)
    assert wishes({"args": args}, "IP=10.1.0.3").addresses == (TWO,)
    assert wishes({}, "IP=10.1.0.3").addresses == (THREE,)


def test_both_families_may_be_asked_for() -> None:
    addresses = wishes({"runtimeConfig": {"ips": ["10.1.0.1", "fd00::1/64"]}}).addresses
    assert addresses == (ONE, ip_address("fd00::1"))


def test_the_hardware_address_comes_from_the_strongest_source() -> None:
    """P-11."""
    runtime, args = {"mac": "02:00:00:00:00:01"}, {"cni": {"mac": "02:00:00:00:00:02"}}
    assert wishes({"runtimeConfig": runtime, "args": args}, "MAC=02:00:00:00:00:03").mac.endswith("1")
    assert wishes({"args": args}, "MAC=02:00:00:00:00:03").mac.endswith("2")
    assert wishes({}, "MAC=02:00:00:00:00:03").mac.endswith("3")


def test_dns_of_the_runtime_beats_that_of_the_configuration() -> None:
    written = {"nameservers": ["10.0.0.2"], "domain": "a.example"}
    spoken = {"servers": ["10.0.0.3"], "searches": ["b.example"], "options": ["ndots:5"]}
    assert wishes({"dns": written, "runtimeConfig": {"dns": spoken}}).dns == Dns(
        nameservers=("10.0.0.3",), search=("b.example",), options=("ndots:5",)
    )
    assert wishes({"dns": written}).dns == Dns(nameservers=("10.0.0.2",), domain="a.example")
    assert wishes({"dns": written, "runtimeConfig": {"dns": {}}}).dns == wishes({"dns": written}).dns


def test_an_empty_list_of_name_servers_is_a_word_too() -> None:
    """P-10: absent and empty differ."""
    assert wishes({"dns": {"nameservers": []}}).dns == Dns()
    assert wishes({"dns": {}}).dns is None
    assert wishes({}).dns is None


def test_labels_of_mesos_and_of_the_conventions_are_found() -> None:
    """contiv 8.6, cni 3."""
    listed = [{"key": "io.contiv.tenant", "value": "blue"}]
    mesos = {"org.apache.mesos": {"network_info": {"labels": {"labels": listed}}}}
    assert wishes({"args": mesos}).labels == {"io.contiv.tenant": "blue"}
    assert wishes({"args": {"cni": {"labels": listed}}}).labels == {"io.contiv.tenant": "blue"}
    assert wishes({}, "io.contiv.network=net1").labels == {"io.contiv.network": "net1"}


def test_labels_of_the_configuration_bind() -> None:
    config: dict[str, object] = {"labels": {"io.contiv.tenant": "blue"}}
    assert wishes(config, "io.contiv.tenant=blue").labels == {"io.contiv.tenant": "blue"}
    refused = refusal(config, "io.contiv.tenant=red")
    assert refused.code == Code.BAD_CONFIG
    assert "io.contiv.tenant" in refused.message
    assert "red" in refused.message


def test_a_foreign_ipam_is_refused_by_name_and_value() -> None:
    """C-023: we are a main plugin with its own addresses; code 2 names key and value."""
    refused = refusal({"ipam": {"type": "host-local"}})
    assert refused.code == Code.UNSUPPORTED_FIELD
    assert "ipam.type 'host-local'" in refused.message
    assert wishes({"ipam": {}}) == wishes({})


@pytest.mark.parametrize(
    "runtime",
    [
        {"portMappings": {}},
        {"portMappings": [80]},
        {"portMappings": [{"containerPort": 80}]},
        {"portMappings": [{"hostPort": 80}]},
        {"portMappings": [{"hostPort": 65_536, "containerPort": 80}]},
        {"portMappings": [{"hostPort": 80, "containerPort": 80, "protocol": "icmp"}]},
        {"portMappings": [{"hostPort": 80, "containerPort": 80, "hostIP": "localhost"}]},
        {"bandwidth": {"ingressRate": -1}},
        {"bandwidth": {"ingressRate": 1.5}},
        {"bandwidth": []},
        {"ips": ["10.1.0.300"]},
        {"ips": "10.1.0.1"},
        {"mac": "02:00"},
        {"mac": 7},
        {"dns": {"servers": "10.0.0.2"}},
        {"aliases": ["a b"]},
        {"aliases": ["../x"]},
        {"aliases": "web"},
        {"io.kubernetes.cri.pod-annotations": {"a": 1}},
        [],
    ],
)
def test_what_cannot_be_read_is_code_7(runtime: object) -> None:
    assert refusal({"runtimeConfig": runtime}).code == Code.BAD_CONFIG
