"""ADD and DEL through the installed plugin, in and out of order as runtimes call them (C-040 to C-071)."""

from __future__ import annotations

import asyncio
import json
import random

import pytest
from tests.support import inventory
from tests.support.modes import ALL_IN_SOAK

from weft.cni.errors import CniError, Code
from weft.cni.request import AttachmentId
from weft.lab.cni.libcni import Output
from weft.lab.hosts import Host, Pod
from weft.lab.netlab import NetLab
from weft.lab.waiting import until


@pytest.fixture
async def host(lab: NetLab) -> Host:
    return await lab.host("one")


async def wait_until_empty(lab: NetLab) -> None:
    """Wait until no address is in use on any node."""
    await inventory.wait_consistent(lab)
    assert inventory.stored(await lab.rest.state()) == set()


def error_of(output: Output) -> CniError:
    error = CniError.decode(output.stdout)
    assert error is not None, output
    return error


@ALL_IN_SOAK
async def test_a_pod_has_address_route_and_connectivity_until_del(lab: NetLab, host: Host) -> None:
    """K1, W36: the node's label differs from its host name, and DEL still releases everything."""
    pod = await host.pod("a")
    (link,) = (each for each in inventory.run_json(pod.netns, "ip", "-j", "addr") if each["ifname"] == "eth0")
    assert str(pod.address()) in [each["local"] for each in link["addr_info"]]
    assert "default" in [route["dst"] for route in inventory.run_json(pod.netns, "ip", "-j", "route")]
    await pod.check()
    await inventory.wait_consistent(lab)
    await pod.detach()
    await pod.detach()
    assert "eth0" not in inventory.devices(pod.netns)
    await wait_until_empty(lab)


@ALL_IN_SOAK
async def test_errors_are_one_json_object_and_leave_nothing(lab: NetLab, host: Host) -> None:
    """K2, W34: missing variables or an invalid namespace fail; there is no false success."""
    netns = str(host.make_netns("a"))
    missing = await host.call("ADD", containerid="a", ifname="eth0")
    assert (missing.exit_code, error_of(missing).code) == (1, Code.BAD_ENVIRONMENT)
    for path in ("/nowhere/at/all", "/etc/hostname"):
        wrong = await host.call("ADD", containerid="a", ifname="eth0", netns=path)
        assert wrong.exit_code == 1
        assert path in error_of(wrong).message
    labels = {"tenant": "none-such", "network": "none-such", "net-group": "none-such"}
    for label, value in labels.items():
        unknown = await host.call("ADD", containerid="a", ifname="eth0", netns=netns, args=f"io.contiv.{label}={value}")
        assert (unknown.exit_code, error_of(unknown).code) == (1, Code.BAD_CONFIG), unknown
        assert value in error_of(unknown).message
    # UX5: a misspelt label does not mean the default tenant.
    for args in ("io.contiv.tennant=default", "IgnoreUnknown=1;IO.contiv.tenant=default", "io.contiv.tenant="):
        misspelt = await host.call("ADD", containerid="a", ifname="eth0", netns=netns, args=args)
        assert (misspelt.exit_code, error_of(misspelt).code) == (1, Code.BAD_CONFIG), misspelt
        assert "io.contiv.tenant" in error_of(misspelt).message
    await wait_until_empty(lab)
    assert (await host.pod("a")).address()


@ALL_IN_SOAK
async def test_an_existing_interface_fails_add_and_is_not_touched(lab: NetLab, host: Host) -> None:
    netns = host.make_netns("a")
    inventory.run(netns, "ip link add eth0 type veth peer name other")
    with pytest.raises(CniError, match="eth0"):
        await host.pod("a")
    assert inventory.devices(netns) == {"eth0", "other"}
    await host.call("DEL", containerid="a", ifname="eth0", netns=str(netns))
    assert inventory.devices(netns) == {"eth0", "other"}
    await wait_until_empty(lab)


@ALL_IN_SOAK
async def test_a_second_add_fails_and_the_first_keeps_working(lab: NetLab, host: Host) -> None:
    """C-048."""
    a, b = await host.pod("a"), await host.pod("b")
    with pytest.raises(CniError, match="already attached"):
        await host.cni.add(host.network, a.attachment)
    await a.check()
    assert await b.eventually_reaches(a)
    await inventory.wait_consistent(lab)


@ALL_IN_SOAK
async def test_one_of_two_concurrent_adds_succeeds(lab: NetLab, host: Host) -> None:
    attachment = host.attachment("a")
    outcomes = await asyncio.gather(*(host.cni.add(host.network, attachment) for _ in range(2)), return_exceptions=True)
    assert sum(isinstance(each, CniError) for each in outcomes) == 1, outcomes
    await inventory.wait_consistent(lab)
    await host.cni.check(host.network, attachment)


@ALL_IN_SOAK
async def test_many_concurrent_adds_and_dels(lab: NetLab, host: Host) -> None:
    pods = await asyncio.gather(*(host.pod(f"p{number}") for number in range(24)))
    assert len({pod.address() for pod in pods}) == 24
    await inventory.wait_consistent(lab)
    await asyncio.gather(*(pod.remove() for pod in pods))
    await wait_until_empty(lab)


@ALL_IN_SOAK
async def test_del_always_succeeds_with_fewer_and_fewer_arguments(lab: NetLab, host: Host) -> None:
    pod = await host.pod("a")
    full = {"containerid": "a", "ifname": "eth0", "netns": str(pod.netns), "args": "K8S_POD_NAME=a", "path": "/x"}
    for left_out in (None, "path", "args", "netns", None):
        full.pop(left_out or "", None)
        output = await host.call("DEL", **full)
        assert (output.exit_code, output.stdout) == (0, b""), output
        await wait_until_empty(lab)


@ALL_IN_SOAK
@pytest.mark.parametrize("same_path", [True, False])
async def test_del_after_the_namespace_was_deleted(lab: NetLab, host: Host, same_path: bool) -> None:
    """The namespace was deleted, or its path belongs to another container by now, which is not touched."""
    pod = await host.pod("a")
    host.remove_netns("a")
    if same_path:
        new_pod = await host.cni.add(host.network, host.attachment("b", netns=str(host.make_netns("a"))))
        assert new_pod.addresses[0].address.ip != pod.address()
    await pod.detach()
    if same_path:
        assert "eth0" in inventory.devices(pod.netns)
    await inventory.wait_consistent(lab)


@ALL_IN_SOAK
async def test_a_late_del_after_a_restart_does_not_touch_a_new_pod(lab: NetLab, host: Host) -> None:
    """Ifindex allocation restarts with the agent: a late DEL must not match a new pod's device at the old path."""
    await lab.tenant("red")
    await lab.network("net", tenant="red", subnet="10.1.0.0/16")
    old = await host.pod("old")
    host.kill()
    await host.start()
    host.remove_netns("old")
    path = str(host.make_netns("old"))
    new_pod = host.attachment("new", tenant="red", network="net", netns=path)
    await host.cni.add(host.network, new_pod)
    await old.detach()
    await host.cni.check(host.network, new_pod)


@ALL_IN_SOAK
async def test_an_old_del_does_not_touch_the_new_pod_of_the_same_name(lab: NetLab, host: Host) -> None:
    """The container ID is the identity, not the pod name: DEL of the first sandbox keeps the second."""
    netns = [str(host.make_netns(name)) for name in ("first", "second")]
    name = "K8S_POD_NAMESPACE=lab;K8S_POD_NAME=web"
    for container, path in zip(("first", "second"), netns, strict=True):
        assert (await host.call("ADD", containerid=container, ifname="eth0", netns=path, args=name)).exit_code == 0
    assert (await host.call("DEL", containerid="first", ifname="eth0", netns=netns[0], args=name)).exit_code == 0
    assert "eth0" in inventory.devices(host.make_netns("second"))
    assert "eth0" not in inventory.devices(host.make_netns("first"))
    await inventory.wait_consistent(lab)
    again = await host.call("ADD", containerid="first", ifname="eth0", netns=netns[0], args=name)
    assert again.exit_code == 0, again


@ALL_IN_SOAK
async def test_runtime_killed_during_add(lab: NetLab, host: Host) -> None:
    """Whether or not the ADD completed, DEL releases it and the next ADD succeeds."""
    for _ in range(8):
        adding = asyncio.ensure_future(host.pod("a"))
        await asyncio.sleep(random.uniform(0, 0.02))  # a random moment of the operation is the purpose
        adding.cancel()
        await asyncio.wait([adding])
        await host.cni.delete(host.network, host.attachment("a"))
        pod = await host.pod("a")
        await pod.check()
        await pod.remove()
    await wait_until_empty(lab)


@ALL_IN_SOAK
async def test_agent_killed_during_add(lab: NetLab, host: Host) -> None:
    """After the restart nothing is half configured, and an ADD without a reply can be repeated."""
    keeper = await host.pod("keeper")
    for _ in range(5):
        adding = [asyncio.ensure_future(host.pod(f"p{number}")) for number in range(4)]
        await asyncio.sleep(random.uniform(0, 0.05))  # a random moment of the operation is the purpose
        host.kill()
        outcomes = await asyncio.gather(*adding, return_exceptions=True)
        await host.start()
        await inventory.wait_consistent(lab)
        for number, outcome in enumerate(outcomes):
            if isinstance(outcome, CniError):
                await host.cni.delete(host.network, host.attachment(f"p{number}"))
                outcomes[number] = await host.pod(f"p{number}")
        for pod in outcomes:
            assert not isinstance(pod, BaseException)
            await pod.check()
            await pod.remove()
    await keeper.check()
    await keeper.remove()
    await wait_until_empty(lab)


@ALL_IN_SOAK
async def test_gc_removes_exactly_what_is_not_listed(lab: NetLab, host: Host) -> None:
    pods = {name: await host.pod(name) for name in "abc"}
    nothing_listed = {"cniVersion": "1.1.0", "name": "weft", "type": "weft-cni"}
    assert (await host.call("GC", nothing_listed, path="/x")).exit_code == 0
    assert len(inventory.routed(host)) == 3, "no list, nothing removed (C-097)"
    foreign = nothing_listed | {"name": "another", "cni.dev/valid-attachments": []}
    assert (await host.call("GC", foreign, path="/x")).exit_code == 0
    assert len(inventory.routed(host)) == 3, "pods of other networks are not touched"
    listed = nothing_listed | {"cni.dev/valid-attachments": [{"containerID": "b", "ifname": "eth0"}]}
    output = await host.call("GC", listed, path="/x")
    assert output.exit_code == 0, output
    await inventory.wait_consistent(lab)
    assert {held.address for held in inventory.routed(host)} == {str(pods["b"].address())}
    await host.cni.gc(host.network, [AttachmentId("b", "eth0")])
    await pods["b"].check()


@ALL_IN_SOAK
async def test_every_spec_version_gets_its_own_result(lab: NetLab, host: Host) -> None:
    for version in ("0.1.0", "0.2.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"):
        name = f"v{version.replace('.', '-')}"
        config = {"cniVersion": version, "name": "weft", "type": "weft-cni"}
        output = await host.call("ADD", config, containerid=name, ifname="eth0", netns=str(host.make_netns(name)))
        assert json.loads(output.stdout)["cniVersion"] == version, output
        assert (await host.call("DEL", config, containerid=name, ifname="eth0")).exit_code == 0
    await wait_until_empty(lab)


@ALL_IN_SOAK
async def test_a_pod_is_detached_when_its_endpoint_is_deleted(lab: NetLab, host: Host) -> None:
    """Its address may be reallocated, so it must not send any more; the runtime's late DEL succeeds."""
    a, b = await host.pod("a"), await host.pod("b")
    await inventory.wait_consistent(lab)
    (await lab.rest.delete_endpoint("a", network="default-net")).accepted()
    await until(lambda: "eth0" not in inventory.devices(a.netns))
    await inventory.wait_consistent(lab)
    with pytest.raises(CniError) as caught:
        await a.check()
    assert caught.value.code == Code.UNKNOWN_CONTAINER
    await a.detach()
    await b.check()


@ALL_IN_SOAK
@pytest.mark.parametrize("family", [4, 6])
async def test_a_reallocated_address_belongs_to_its_new_pod_only(lab: NetLab, family: int) -> None:
    """An operator deletes an endpoint, and its address is reallocated on another host: the old pod cannot send."""
    await lab.network("small", subnet="10.1.1.0/24", ipv6Subnet="2001:db8:1::/64")
    wanted = {4: "10.1.1.77", 6: "2001:db8:1::77"}[family]
    one, two = await asyncio.gather(lab.host("one"), lab.host("two"))
    witness = await two.pod("witness", network="small")
    old = await one.pod("old", network="small", address=wanted)
    assert await old.eventually_reaches(witness, family=family)
    (await lab.rest.delete_endpoint("old", network="small")).accepted()
    new = await two.pod("new", network="small", address=wanted)
    assert await witness.eventually_reaches(new, family=family)
    await until(lambda: "eth0" not in inventory.devices(old.netns))
    await inventory.wait_consistent(lab)
    await old.detach()
    assert await witness.eventually_reaches(new, family=family)


@ALL_IN_SOAK
async def test_a_second_interface_does_not_affect_the_first(lab: NetLab, host: Host) -> None:
    """The default route stays on eth0; the other network is reached through its own interface."""
    await lab.network("other", subnet="10.2.0.0/16", gateway="10.2.255.254", ipv6Subnet="2001:db8:2::/64")
    a, b, c = await host.pod("a"), await host.pod("b"), await host.pod("c", network="other")
    second = host.attachment("a", network="other", ifname="net1")
    result = await host.cni.add(host.network, second)
    await a.check()
    await host.cni.check(host.network, second)
    through_net1 = Pod(host, second, a.namespace, result)
    assert await a.eventually_reaches(b)
    for family in (4, 6):
        assert await through_net1.eventually_reaches(c, family=family)
    await host.cni.delete(host.network, second)
    await a.check()
    assert await b.eventually_reaches(a)
    await inventory.wait_consistent(lab)
