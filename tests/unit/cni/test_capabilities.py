"""Capabilities and labels as containerd, podman, Mesos and the CNI conventions write them."""

from __future__ import annotations

from ipaddress import ip_address

import pytest

from weft.cni.arguments import parse_arguments
from weft.cni.capabilities import CAPABILITIES, Capabilities, parse_capabilities
from weft.cni.errors import CniError, Code
from weft.cni.json_reader import Document
from weft.cni.portmap_bandwidth import Bandwidth, PortMapping
from weft.cni.result import Dns

ONE, TWO, THREE = (ip_address(f"10.1.0.{last}") for last in (1, 2, 3))


def capabilities(config: dict[str, object], args: str = "") -> Capabilities:
    return parse_capabilities(Document(config), parse_arguments(args, refuse_unknown=True), network="blue")


def refusal(config: dict[str, object], args: str = "") -> CniError:
    with pytest.raises(CniError) as refused:
        capabilities(config, args)
    return refused.value


def test_no_request_is_no_capability() -> None:
    assert capabilities({}) == Capabilities(labels={}, annotations={})


PORTS_OF_CONTAINERD = [{"HostPort": 18081, "ContainerPort": 8081, "Protocol": "tcp", "HostIP": "10.200.0.11"}]
PORTS_OF_PODMAN = [{"hostPort": 80, "containerPort": 8080, "protocol": "udp", "hostIP": ""}]
RATES_OF_CONTAINERD = {"IngressRate": 10_000_000, "IngressBurst": 4_294_967_295, "EgressRate": 0, "EgressBurst": 0}


def test_ports_of_the_host_are_declared_and_read() -> None:
    """P-51: names of members come in any case."""
    assert "portMappings" in CAPABILITIES
    assert capabilities({"runtimeConfig": {"portMappings": PORTS_OF_CONTAINERD + PORTS_OF_PODMAN}}).ports == (
        PortMapping(protocol="tcp", host_port=18081, container_port=8081, host_ip=ip_address("10.200.0.11")),
        PortMapping(protocol="udp", host_port=80, container_port=8080),
    )


def test_rates_are_declared_and_read() -> None:
    """P-52: a burst without a rate has no effect."""
    assert "bandwidth" in CAPABILITIES
    assert capabilities({"runtimeConfig": {"bandwidth": RATES_OF_CONTAINERD}}).bandwidth == Bandwidth(
        ingress_rate=10_000_000, ingress_burst=4_294_967_295
    )


def test_loopback_is_forwarded_where_the_kernel_can() -> None:
    """IPv6 loopback it cannot forward; IPv4 is tested with packets (CVE-2020-8558)."""
    port = {"hostPort": 1, "containerPort": 1}
    (mapping,) = capabilities({"runtimeConfig": {"portMappings": [{**port, "hostIP": "127.0.0.1"}]}}).ports
    assert str(mapping.host_ip) == "127.0.0.1"
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
def test_no_ports_and_no_rates_are_no_capability(runtime: dict[str, object]) -> None:
    assert capabilities({"runtimeConfig": runtime}) == capabilities({})


def test_containerd_passes_annotations() -> None:
    """cni 5."""
    runtime = {"io.kubernetes.cri.pod-annotations": {"orch/net": "green"}}
    assert dict(capabilities({"runtimeConfig": runtime}).annotations) == {"orch/net": "green"}


def test_podman_writes_aliases_by_network() -> None:
    """cni 5."""
    runtime = {"aliases": {"blue": ["al1", "0123456789ab"], "red": ["other"]}}
    assert capabilities({"runtimeConfig": runtime}).aliases == ("al1", "0123456789ab")


def test_aliases_may_be_a_list() -> None:
    """cni 3."""
    assert capabilities({"runtimeConfig": {"aliases": ["web", "web_1"]}}).aliases == ("web", "web_1")


def test_addresses_come_from_the_source_of_highest_precedence() -> None:
    """P-45, cni 3: runtimeConfig, then `args`, then CNI_ARGS; a prefix length is ignored."""
    runtime, args = {"ips": ["10.1.0.1/24"]}, {"cni": {"ips": ["10.1.0.2"]}}
    assert capabilities({"runtimeConfig": runtime, "args": args}, "IP=10.1.0.3").addresses == (ONE,)
    assert capabilities({"args": args}, "IP=10.1.0.3").addresses == (TWO,)
    assert capabilities({}, "IP=10.1.0.3").addresses == (THREE,)


def test_both_families_may_be_asked_for() -> None:
    addresses = capabilities({"runtimeConfig": {"ips": ["10.1.0.1", "fd00::1/64"]}}).addresses
    assert addresses == (ONE, ip_address("fd00::1"))


def test_the_mac_comes_from_the_source_of_highest_precedence() -> None:
    """P-11."""
    runtime, args = {"mac": "02:00:00:00:00:01"}, {"cni": {"mac": "02:00:00:00:00:02"}}
    assert capabilities({"runtimeConfig": runtime, "args": args}, "MAC=02:00:00:00:00:03").mac.endswith("1")
    assert capabilities({"args": args}, "MAC=02:00:00:00:00:03").mac.endswith("2")
    assert capabilities({}, "MAC=02:00:00:00:00:03").mac.endswith("3")


def test_dns_of_the_runtime_beats_that_of_the_configuration() -> None:
    configured = {"nameservers": ["10.0.0.2"], "domain": "a.example"}
    requested = {"servers": ["10.0.0.3"], "searches": ["b.example"], "options": ["ndots:5"]}
    assert capabilities({"dns": configured, "runtimeConfig": {"dns": requested}}).dns == Dns(
        nameservers=("10.0.0.3",), search=("b.example",), options=("ndots:5",)
    )
    assert capabilities({"dns": configured}).dns == Dns(nameservers=("10.0.0.2",), domain="a.example")
    assert capabilities({"dns": configured, "runtimeConfig": {"dns": {}}}).dns == capabilities({"dns": configured}).dns


def test_an_empty_list_of_name_servers_counts() -> None:
    """P-10: absent and empty differ."""
    assert capabilities({"dns": {"nameservers": []}}).dns == Dns()
    assert capabilities({"dns": {}}).dns is None
    assert capabilities({}).dns is None


def test_labels_of_mesos_and_of_the_conventions_are_found() -> None:
    """contiv 8.6, cni 3."""
    listed = [{"key": "io.contiv.tenant", "value": "blue"}]
    mesos = {"org.apache.mesos": {"network_info": {"labels": {"labels": listed}}}}
    assert capabilities({"args": mesos}).labels == {"io.contiv.tenant": "blue"}
    assert capabilities({"args": {"cni": {"labels": listed}}}).labels == {"io.contiv.tenant": "blue"}
    assert capabilities({}, "io.contiv.network=net1").labels == {"io.contiv.network": "net1"}


def test_labels_of_the_configuration_are_binding() -> None:
    config: dict[str, object] = {"labels": {"io.contiv.tenant": "blue"}}
    assert capabilities(config, "io.contiv.tenant=blue").labels == {"io.contiv.tenant": "blue"}
    refused = refusal(config, "io.contiv.tenant=red")
    assert refused.code == Code.BAD_CONFIG
    assert "io.contiv.tenant" in refused.message
    assert "red" in refused.message


def test_a_foreign_ipam_is_refused_by_name_and_value() -> None:
    """C-023: we are a main plugin with its own addresses; code 2 names key and value."""
    refused = refusal({"ipam": {"type": "host-local"}})
    assert refused.code == Code.UNSUPPORTED_FIELD
    assert "ipam.type 'host-local'" in refused.message
    assert capabilities({"ipam": {}}) == capabilities({})


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
