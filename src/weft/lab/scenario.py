"""The scenario of `weft lab`. Every step verifies its result with packets, and a wrong result ends the demo."""

from __future__ import annotations

import asyncio
from itertools import permutations

from rich.console import Console
from rich.table import Table

from weft.lab.console import Demo, DemoFailed
from weft.lab.hosts import Host, Pod
from weft.lab.netlab import NetLab
from weft.lab.services_demo import show_services
from weft.lab.traffic import stream

SUBNET = "10.1.0.0/16"
TENANTS = ("blue", "red")
OBJECTS = tuple(
    line
    for tenant in TENANTS
    for line in (
        f"netctl tenant create {tenant}",
        f"netctl network create -t {tenant} -s {SUBNET} -g 10.1.255.254 -s6 2001:db8:1::/64 net",
    )
)
POLICY = (
    "netctl policy create -t blue web-only",
    "netctl policy rule-add -t blue -d in -l tcp -P 80 -p 10 web-only http",
    "netctl policy rule-add -t blue -d in -l udp -P 5000 -p 10 web-only stream",
    "netctl policy rule-add -t blue -d in -j deny -p 1 web-only rest",
    "netctl group create -t blue -p web-only net web",
)
POLICY_QUERIES = ("weft trace blue-1 blue-web tcp/22", "netctl policy rule-rm -t blue web-only rest --preview")
ALLOW_ALL = "netctl policy rule-rm -t blue web-only rest --wait"
DENY_REST = "netctl policy rule-add -t blue -d in -j deny -p 1 web-only rest --wait"
# Name, host, tenant, group.
PODS = (
    ("blue-1", "one", "blue", ""),
    ("blue-2", "one", "blue", ""),
    ("blue-web", "two", "blue", "web"),
    ("red-1", "one", "red", ""),
    ("red-2", "two", "red", ""),
)
WEB, WEB_PORT = "blue-web", 80


async def run_scenario(console: Console, lab: NetLab) -> None:
    """Run all steps; `DemoFailed` if one has another result than promised."""
    demo = Demo(console, lab)
    demo.heading("Cluster", "Starting netmaster with its store, and two hosts with agents on a shared underlay.")
    one, two = await asyncio.gather(lab.host("one"), lab.host("two"))
    hosts = {"one": one, "two": two}
    demo.heading("Two tenants with the same subnet")
    for line in (*OBJECTS, *POLICY):
        await demo.run(line)
    demo.heading("Pods", "Attached with CNI ADD, as a container runtime does.")
    pods = {name: await demo.attach(name, hosts[host], tenant, group) for name, host, tenant, group in PODS}
    demo.heading("Connectivity", "Measured with TCP. Both tenants use the same addresses and are isolated.")
    await _show_connectivity(demo, pods)
    demo.heading("Network policy", "Group web, with pod blue-web, allows ingress on tcp/80 and udp/5000 only.")
    await _show_policy(demo, one, pods)
    demo.heading(
        "Services", "The name shop has one IPv4 and one IPv6 VIP. Its backends are the pods with label app=shop."
    )
    await show_services(demo, hosts, pods["blue-1"])
    demo.heading("Restart", "kill -9 netmaster and both agents under traffic, then start them again.")
    await _restart_under_traffic(demo, one, two, pods)
    await _show_connectivity(demo, pods)
    for pod in pods.values():
        # CHECK compares with the result of ADD, from before the restart.
        await pod.check()
        await pod.remove()
    demo.heading("Done", "CHECK succeeded for every pod, and DEL removed them. The lab leaves nothing on this machine.")


async def _show_tcp(demo: Demo, source: Pod, target: Pod, *, port: int, allowed: bool) -> None:
    """Print whether TCP passes; `DemoFailed` if it is not as expected.

    The first packet decides: policy applies to it, and no retry is needed.
    """
    as_expected = await (source.reaches if allowed else source.never_reaches)(target, port=port)
    verdict = "[green]allowed[/]" if allowed else "[red]denied[/]"
    demo.print(f"{source.name} -> {target.name} tcp/{port}: {verdict}")
    if not as_expected:
        raise DemoFailed(f"weft lab: tcp/{port} to {target.name} should be {'allowed' if allowed else 'denied'}")


async def _show_connectivity(demo: Demo, pods: dict[str, Pod]) -> None:
    """Print the TCP connectivity of all pairs: within a tenant everything passes, between tenants nothing."""
    pairs = list(permutations(pods, 2))
    # Pairs run concurrently, each with its own port: pods of two tenants share addresses, and a common port would not
    # show which of them a connection came from. Policy allows only one port of the web pod, so its pairs run in turn.
    web = [pair for pair in pairs if _same_tenant(*pair) and pair[1] == WEB]
    others = [pair for pair in pairs if pair not in web]
    checks = (_is_as_expected(pods, *pair, port=port) for port, pair in enumerate(others, start=1000))
    as_expected = dict(zip(others, await asyncio.gather(*checks), strict=True))
    as_expected |= {pair: await _is_as_expected(pods, *pair, port=WEB_PORT) for pair in web}
    table = Table("from \\ to", *(f"{name}\non {pod.host.name}" for name, pod in pods.items()))
    for source, pod in pods.items():
        cells = ["·" if source == target else _cell(source, target) for target in pods]
        table.add_row(f"{source} {pod.address()}", *cells)
    if wrong := [pair for pair, expected in as_expected.items() if not expected]:
        raise DemoFailed(f"weft lab: unexpected connectivity: {wrong}")
    demo.console.print(table)


async def _is_as_expected(pods: dict[str, Pod], source: str, target: str, *, port: int) -> bool:
    # Eventually: the pods were attached a moment ago, and a host may not have the route of a remote pod yet.
    check = pods[source].eventually_reaches if _same_tenant(source, target) else pods[source].never_reaches
    return await check(pods[target], port=port)


async def _show_policy(demo: Demo, one: Host, pods: dict[str, Pod]) -> None:
    source, target = pods["blue-1"], pods[WEB]
    await _show_tcp(demo, source, target, port=WEB_PORT, allowed=True)
    await _show_tcp(demo, source, target, port=22, allowed=False)
    demo.print("The drops include probes of the table above: red-2 has the address of blue-web.")
    await demo.run("weft drops --tenant blue --pod blue-web", on=one)
    await demo.run("weft drops --tenant blue --counters", on=one)
    for line in POLICY_QUERIES:
        await demo.run(line)
    await demo.run(ALLOW_ALL)
    await _show_tcp(demo, source, target, port=22, allowed=True)
    await demo.run(DENY_REST)
    await _show_tcp(demo, source, target, port=22, allowed=False)


async def _restart_under_traffic(demo: Demo, one: Host, two: Host, pods: dict[str, Pod]) -> None:
    stop = asyncio.Event()
    running = asyncio.ensure_future(stream(pods["blue-1"].place(), pods["blue-web"].place(), port=5000, stop=stop))
    # All at once: the worst case, in which nothing is left that could report what is running.
    for process in (one, two, demo.lab.master):
        process.kill()
    await asyncio.gather(demo.lab.master.start(), one.start(), two.start())
    stop.set()
    sent, arrived = await running
    demo.print(f"{arrived} of {sent} packets between the hosts arrived during the restart")
    # The datapath forwards without the agents, so not a single packet may be missing.
    if arrived != sent:
        raise DemoFailed("weft lab: packets were lost")
    await demo.run("netctl endpoint ls -a")


def _same_tenant(source: str, target: str) -> bool:
    return source.partition("-")[0] == target.partition("-")[0]


def _cell(source: str, target: str) -> str:
    return "[green]yes[/]" if _same_tenant(source, target) else "[red]no[/]"
