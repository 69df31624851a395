"""Requests as real runtimes make them, and everything that may be wrong with one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from ipaddress import ip_interface

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.cni.errors import CniError, Code
from weft.cni.request import Add, AttachmentId, Check, Del, Gc, Status, Verb, Version, parse_request
from weft.cni.versions import SUPPORTED, SpecVersion

NETNS = "/var/run/netns/cni-0d1b"
CONFIG = {"cniVersion": "1.1.0", "name": "blue", "type": "weft-cni"}
PREV_RESULT = {
    "cniVersion": "1.1.0",
    "interfaces": [{"name": "eth0", "sandbox": NETNS}],
    "ips": [{"address": "10.1.0.5/24", "interface": 0}],
}


def environment(verb: str, **changes: str | None) -> dict[str, str]:
    full = {
        "CNI_COMMAND": verb,
        "CNI_CONTAINERID": "c1",
        "CNI_NETNS": NETNS,
        "CNI_IFNAME": "eth0",
        "CNI_PATH": "/opt/cni/bin",
    } | {f"CNI_{name.upper()}": value for name, value in changes.items()}
    return {name: value for name, value in full.items() if value is not None}


def stdin(**changes: object) -> bytes:
    members = CONFIG | {name.replace("cni_dev", "cni.dev/"): value for name, value in changes.items()}
    return json.dumps({name: value for name, value in members.items() if value is not ...}).encode()


def refusal(env: Mapping[str, str], config: bytes) -> CniError:
    with pytest.raises(CniError) as refused:
        parse_request(env, config)
    return refused.value


class TestVerbs:
    def test_add(self) -> None:
        request = parse_request(environment("ADD", args="IgnoreUnknown=1;K8S_POD_NAME=a"), stdin())
        assert isinstance(request, Add)
        assert request.attachment == AttachmentId("c1", "eth0")
        assert (request.netns, request.arguments.pod_name) == (NETNS, "a")
        assert (request.config.name, request.config.type) == ("blue", "weft-cni")
        assert request.config.prev_result is None

    def test_add_in_a_chain_has_the_result_before_it(self) -> None:
        """C-044."""
        request = parse_request(environment("ADD"), stdin(prevResult=PREV_RESULT))
        assert isinstance(request, Add)
        assert request.config.prev_result is not None
        assert request.config.prev_result.addresses[0].address == ip_interface("10.1.0.5/24")

    @pytest.mark.parametrize("netns", ["", None])
    def test_del_without_namespace(self, netns: str | None) -> None:
        """C-006, C-060: `ctr` and kubelet's later DELs."""
        request = parse_request(environment("DEL", netns=netns), stdin())
        assert isinstance(request, Del)
        assert (request.attachment, request.netns) == (AttachmentId("c1", "eth0"), "")

    def test_check(self) -> None:
        request = parse_request(environment("CHECK"), stdin(prevResult=PREV_RESULT))
        assert isinstance(request, Check)
        assert request.prev_result.interfaces[0].sandbox == NETNS

    def test_gc(self) -> None:
        """C-095: no container, namespace or interface is named in the environment."""
        valid = [{"containerID": "c1", "ifname": "eth0"}, {"containerID": "c2", "ifname": "eth1"}]
        env = environment("GC", containerid="", netns="", ifname="")
        request = parse_request(env, stdin(**{"cni_devvalid-attachments": valid}))
        assert isinstance(request, Gc)
        assert request.valid == frozenset({AttachmentId("c1", "eth0"), AttachmentId("c2", "eth1")})

    def test_status(self) -> None:
        """C-007, C-092: as containerd 2.1 calls it."""
        request = parse_request(environment("STATUS", containerid="", netns="", ifname=""), stdin())
        assert isinstance(request, Status)
        assert request.config.name == "blue"

    def test_version_needs_nothing_else(self) -> None:
        """C-008: podman asks with dummies."""
        assert isinstance(parse_request({"CNI_COMMAND": "VERSION"}, b""), Version)
        dummies = {"CNI_COMMAND": "VERSION", "CNI_NETNS": "dummy", "CNI_IFNAME": "dummy", "CNI_PATH": "dummy"}
        assert isinstance(parse_request(dummies, b'{"cniVersion":"1.0.0"}'), Version)

    @pytest.mark.parametrize("verb", ["", "add", "UPDATE", "ADD "])
    def test_other_verbs_are_code_4(self, verb: str) -> None:
        """C-004."""
        refused = refusal(environment(verb), stdin())
        assert refused.code == Code.BAD_ENVIRONMENT
        assert "CNI_COMMAND" in refused.message


class TestEnvironment:
    @pytest.mark.parametrize(
        ("verb", "needed"),
        [
            ("ADD", ["CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME"]),
            ("CHECK", ["CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME"]),
            ("DEL", ["CNI_CONTAINERID", "CNI_IFNAME"]),
            ("GC", ["CNI_PATH"]),
        ],
    )
    def test_all_that_is_missing_is_named_at_once(self, verb: str, needed: list[str]) -> None:
        """C-005, C-006, C-007, C-009."""
        refused = refusal({"CNI_COMMAND": verb}, stdin())
        assert refused.code == Code.BAD_ENVIRONMENT
        assert f"{verb} needs {', '.join(needed)} in the environment" == refused.message

    def test_empty_is_missing(self) -> None:
        """C-009, C-010."""
        refused = refusal(environment("ADD", containerid="", ifname=""), stdin())
        assert refused.message == "ADD needs CNI_CONTAINERID, CNI_IFNAME in the environment"

    def test_status_needs_the_command_alone(self) -> None:
        """C-007."""
        assert isinstance(parse_request({"CNI_COMMAND": "STATUS"}, stdin()), Status)

    @pytest.mark.parametrize("container", ["a", "default-t2", "cnitool-77383ca0a0715733ca6f", "A_b.c-1", "0" * 64])
    def test_container_ids_of_runtimes_pass(self, container: str) -> None:
        """C-010."""
        request = parse_request(environment("ADD", containerid=container), stdin())
        assert isinstance(request, Add)
        assert request.attachment.container == container

    @pytest.mark.parametrize("container", ["_a", ".a", "-a", "a/b", "../a", "a b", "a\n", "é", "a:b", "a" * 256])
    def test_other_container_ids_are_code_4(self, container: str) -> None:
        """C-010."""
        for verb in ("ADD", "DEL", "CHECK"):
            refused = refusal(environment(verb, containerid=container), stdin(prevResult=PREV_RESULT))
            assert refused.code == Code.BAD_ENVIRONMENT
            assert "CNI_CONTAINERID" in refused.message

    @pytest.mark.parametrize("ifname", ["e", "eth0", "a.b-c_d@1", "fifteen-letters", "ééééééé"])
    def test_interface_names_of_the_kernel_pass(self, ifname: str) -> None:
        """C-011: fifteen bytes, of any letters."""
        request = parse_request(environment("ADD", ifname=ifname), stdin())
        assert isinstance(request, Add)
        assert request.attachment.ifname == ifname

    @pytest.mark.parametrize(
        "ifname", [".", "..", "a/b", "a:b", "a b", "a\tb", "a\n", "sixteen-letters-", "éééééééé", "eth%d", "a\x01"]
    )
    def test_other_interface_names_are_code_4(self, ifname: str) -> None:
        """C-011, C-042."""
        refused = refusal(environment("DEL", ifname=ifname), stdin())
        assert refused.code == Code.BAD_ENVIRONMENT
        assert "CNI_IFNAME" in refused.message

    def test_a_relative_namespace_is_code_4(self) -> None:
        refused = refusal(environment("ADD", netns="netns/a"), stdin())
        assert refused.code == Code.BAD_ENVIRONMENT
        assert "CNI_NETNS" in refused.message

    def test_a_namespace_of_a_process_passes(self) -> None:
        """`ctr run --cni`."""
        request = parse_request(environment("ADD", netns="/proc/4390/ns/net"), stdin())
        assert isinstance(request, Add)
        assert request.netns == "/proc/4390/ns/net"

    def test_unknown_arguments_stop_add_and_check_but_not_del(self) -> None:
        """C-016; what was never added need not be understood to be removed."""
        for verb in ("ADD", "CHECK"):
            refused = refusal(environment(verb, args="COLOUR=blue"), stdin(prevResult=PREV_RESULT))
            assert refused.code == Code.BAD_ENVIRONMENT
        assert isinstance(parse_request(environment("DEL", args="COLOUR=blue"), stdin()), Del)

    def test_other_variables_are_tolerated(self) -> None:
        """C-015, C-018."""
        env = environment("ADD") | {"TRACEPARENT": "00-1-2-01", "CNI_NETNS_OVERRIDE": "1", "CNI_NEW": "x"}
        assert isinstance(parse_request(env, stdin()), Add)


class TestConfiguration:
    @pytest.mark.parametrize(
        "text", [b"", b"{", b"[]", b"null", b'"x"', b"{}x", b"\xff{}", b'{"a":NaN}', b"[" * 99_999]
    )
    @pytest.mark.parametrize("verb", ["ADD", "DEL", "STATUS"])
    def test_what_is_not_an_object_is_code_6(self, verb: str, text: bytes) -> None:
        """C-013, C-070."""
        assert refusal(environment(verb), text).code == Code.NOT_DECODED

    @pytest.mark.parametrize("name", ["", ..., None, 7, "_a", "a/b", "../a", "a b", "x" * 256])
    @pytest.mark.parametrize("verb", ["ADD", "DEL", "GC"])
    def test_a_network_needs_a_name(self, verb: str, name: object) -> None:
        """C-012, C-070."""
        refused = refusal(environment(verb), stdin(name=name))
        assert refused.code == Code.BAD_CONFIG
        assert "name" in refused.message

    @pytest.mark.parametrize("kind", ["", ..., 7, "../weft-cni", "a/b"])
    def test_a_plugin_needs_a_type_that_is_no_path(self, kind: object) -> None:
        """C-021, CVE-2021-20206."""
        assert refusal(environment("ADD"), stdin(type=kind)).code == Code.BAD_CONFIG

    def test_a_silent_configuration_is_of_the_first_version(self) -> None:
        """C-024."""
        request = parse_request(environment("ADD"), stdin(cniVersion=...))
        assert isinstance(request, Add)
        assert request.config.version is SpecVersion.V0_1_0

    @pytest.mark.parametrize("version", SUPPORTED)
    def test_every_version_can_add_and_delete(self, version: SpecVersion) -> None:
        """C-093."""
        for verb in ("ADD", "DEL"):
            request = parse_request(environment(verb), stdin(cniVersion=version))
            assert isinstance(request, Add | Del)
            assert request.config.version is version

    @pytest.mark.parametrize("verb", ["ADD", "DEL", "CHECK", "GC", "STATUS"])
    def test_an_unknown_version_is_code_1(self, verb: str) -> None:
        """C-025."""
        refused = refusal(environment(verb), stdin(cniVersion="9.0.0"))
        assert refused.code == Code.INCOMPATIBLE_VERSION
        assert "requested: 9.0.0" in refused.details

    @pytest.mark.parametrize(
        ("verb", "since"), [("CHECK", SpecVersion.V0_4_0), ("GC", SpecVersion.V1_1_0), ("STATUS", SpecVersion.V1_1_0)]
    )
    def test_verbs_came_with_versions(self, verb: str, since: SpecVersion) -> None:
        """C-080, C-092, C-099, P-33, P-35."""
        for version in SUPPORTED:
            config = stdin(cniVersion=version, prevResult=PREV_RESULT)
            if version >= since:
                parse_request(environment(verb), config)
            else:
                refused = refusal(environment(verb), config)
                assert refused.code == Code.INCOMPATIBLE_VERSION
                assert f"does not allow {verb}" in refused.message

    def test_unknown_members_are_ignored(self) -> None:
        """C-023: kuryr's configuration has two of its own."""
        assert isinstance(parse_request(environment("ADD"), stdin(kuryr_conf="/etc/kuryr/kuryr.conf", debug=True)), Add)

    @pytest.mark.parametrize("members", [{"runtimeConfig": {"mac": 7}}, {"ipam": {"type": "dhcp"}}, {"labels": []}])
    def test_invalid_capabilities_stop_add_but_not_del(self, members: dict[str, object]) -> None:
        """C-065: whatever ADD did not like, DEL after it succeeds."""
        assert refusal(environment("ADD"), stdin(**members)).code in {Code.BAD_CONFIG, Code.UNSUPPORTED_FIELD}
        assert isinstance(parse_request(environment("DEL"), stdin(**members)), Del)


class TestPrevResult:
    @pytest.mark.parametrize("value", [..., None, {}])
    def test_check_needs_it(self, value: object) -> None:
        """C-080."""
        assert refusal(environment("CHECK"), stdin(prevResult=value)).code == Code.BAD_CONFIG

    @pytest.mark.parametrize("value", [..., None, {}, [], "x", {"ips": 7}, {"cniVersion": "9.0.0", "ips": []}])
    def test_del_does_not(self, value: object) -> None:
        """C-066."""
        request = parse_request(environment("DEL"), stdin(prevResult=value))
        assert isinstance(request, Del)
        assert request.config.prev_result is None

    def test_one_that_cannot_be_read_stops_add_and_check(self) -> None:
        for verb in ("ADD", "CHECK"):
            assert refusal(environment(verb), stdin(prevResult={"ips": 7})).code == Code.BAD_CONFIG

    def test_an_old_one_is_read_in_its_own_version(self) -> None:
        prev_result = {"cniVersion": "0.2.0", "ip4": {"ip": "10.1.0.5/24"}}
        request = parse_request(environment("ADD"), stdin(cniVersion="0.2.0", prevResult=prev_result))
        assert isinstance(request, Add)
        assert request.config.prev_result is not None
        assert len(request.config.prev_result.addresses) == 1


class TestValidAttachments:
    def gc(self, **members: object) -> frozenset[AttachmentId] | None:
        request = parse_request(environment("GC"), stdin(**members))
        assert isinstance(request, Gc)
        return request.valid

    def test_absent_and_empty_differ(self) -> None:
        """C-097: no list removes nothing, an empty list removes all."""
        assert self.gc() is None
        assert self.gc(**{"cni_devvalid-attachments": None}) is None
        assert self.gc(**{"cni_devvalid-attachments": []}) == frozenset()

    def test_the_old_spelling_counts(self) -> None:
        """C-095."""
        valid = self.gc(cni_devattachments=[{"containerID": "c1", "ifname": "eth0"}])
        assert valid == frozenset({AttachmentId("c1", "eth0")})

    def test_the_right_spelling_wins(self) -> None:
        assert self.gc(**{"cni_devvalid-attachments": [], "cni_devattachments": [{"containerID": "c1"}]}) == frozenset()

    @pytest.mark.parametrize(
        "listed",
        [{}, "c1", [7], [{"containerID": "c1"}], [{"ifname": "eth0"}], [{"containerID": "../c1", "ifname": "eth0"}]],
    )
    def test_a_list_that_cannot_be_read_removes_nothing(self, listed: object) -> None:
        """C-096: the unreadable one might be in use."""
        refused = refusal(environment("GC"), stdin(**{"cni_devvalid-attachments": listed}))
        assert refused.code == Code.BAD_CONFIG


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)
MEMBERS = st.sampled_from(
    [
        "cniVersion",
        "name",
        "type",
        "args",
        "runtimeConfig",
        "prevResult",
        "dns",
        "ipam",
        "labels",
        "cni.dev/attachments",
    ]
)


@given(verb=st.sampled_from(Verb), changes=st.dictionaries(MEMBERS, JSON), args=st.text())
def test_any_request_is_understood_or_refused(verb: Verb, changes: dict[str, object], args: str) -> None:
    """Nothing from outside raises anything else."""
    try:
        parse_request(environment(verb, args=args), json.dumps(CONFIG | changes).encode())
    except CniError as refused:
        json.loads(refused.encode(version="1.0.0"))


@given(config=st.binary())
def test_any_bytes_are_understood_or_refused(config: bytes) -> None:
    with pytest.raises(CniError):
        parse_request(environment("ADD"), config)
