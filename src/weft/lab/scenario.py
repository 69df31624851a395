"""What `weft lab` tells. Each step is checked: a lab that would show something untrue ends with an error."""

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
QUESTIONS = ("weft trace blue-1 blue-web tcp/22", "netctl policy rule-rm -t blue web-only rest --preview")
OPEN_UP = "netctl policy rule-rm -t blue web-only rest --wait"
CLOSE_AGAIN = "netctl policy rule-add -t blue -d in -j deny -p 1 web-only rest --wait"
# Name, host, tenant, group.
PODS = (
    ("blue-1", "one", "blue", ""),
    ("blue-2", "one", "blue", ""),
    ("blue-web", "two", "blue", "web"),
    ("red-1", "one", "red", ""),
    ("red-2", "two", "red", ""),
)
WEB, WEB_PORT = "blue-web", 80


async def tell(console: Console, lab: NetLab) -> None:
    """The whole story."""
    story = Demo(console, lab)
    story.say("A cluster", "netmaster with its store, and two hosts with their agents, joined by an underlay")
    one, two = await asyncio.gather(lab.host("one"), lab.host("two"))
    hosts = {"one": one, "two": two}
    story.say("Two tenants with the same subnet")
    for line in (*OBJECTS, *POLICY):
        await story.run(line)
    story.say("Pods, attached by the CNI program as a container runtime does it")
    pods = {name: await story.attach(name, hosts[host], tenant, group) for name, host, tenant, group in PODS}
    story.say("Who reaches whom, by real packets", "The same addresses in both tenants, and they never meet.")
    await _show_reach(story, pods)
    story.say("Policy, from the first packet on", "blue-web is in group web, whose policy lets in tcp/80 and udp/5000.")
    await _show_policy(story, one, pods)
    story.say("A service", "One name, an address of each family: all pods with the label app=shop answer.")
    await show_services(story, hosts, pods["blue-1"])
    story.say("kill -9 both agents and netmaster, start them again: nothing is lost")
    await _kill_under_traffic(story, one, two, pods)
    await _show_reach(story, pods)
    for pod in pods.values():
        await pod.check()
        await pod.remove()
    story.say("All pods are gone, and with this process everything else")


async def _show_answer(story: Demo, source: Pod, target: Pod, *, port: int, passes: bool) -> None:
    """Whether a question comes through; it must be as promised."""
    held = await (source.reaches if passes else source.never_reaches)(target, port=port)
    words = "[green]is answered[/]" if passes else "[red]is refused[/]"
    story.tell(f"{source.name} asks {target.name} at tcp/{port}: {words}")
    if not held:
        raise DemoFailed(f"weft lab: tcp/{port} of {target.name} is not as promised")


async def _show_reach(story: Demo, pods: dict[str, Pod]) -> None:
    """A table of who reaches whom by TCP; it must be: within a tenant always, between tenants never."""
    pairs = list(permutations(pods, 2))
    # Each pair has a port of its own, as equal addresses of two tenants would hear each other's questions; but the
    # web pod takes only one, so those who may ask it do so one after the other.
    web = [pair for pair in pairs if _is_kin(*pair) and pair[1] == WEB]
    others = [pair for pair in pairs if pair not in web]
    asked = (_is_as_promised(pods, *pair, port=port) for port, pair in enumerate(others, start=1000))
    right = dict(zip(others, await asyncio.gather(*asked), strict=True))
    right |= {pair: await _is_as_promised(pods, *pair, port=WEB_PORT) for pair in web}
    table = Table("from \\ to", *(f"{name}\non {pod.host.name}" for name, pod in pods.items()))
    for source, pod in pods.items():
        cells = ["·" if source == target else _cell(source, target) for target in pods]
        table.add_row(f"{source} {pod.address()}", *cells)
    if not all(right.values()):
        raise DemoFailed(f"weft lab: not as promised: {[pair for pair, held in right.items() if not held]}")
    story.console.print(table)


async def _is_as_promised(pods: dict[str, Pod], source: str, target: str, *, port: int) -> bool:
    ask = pods[source].reaches if _is_kin(source, target) else pods[source].never_reaches
    return await ask(pods[target], port=port)


async def _show_policy(story: Demo, one: Host, pods: dict[str, Pod]) -> None:
    source, target = pods["blue-1"], pods[WEB]
    await _show_answer(story, source, target, port=WEB_PORT, passes=True)
    await _show_answer(story, source, target, port=22, passes=False)
    await story.run("weft drops --tenant blue --pod blue-web", on=one)
    await story.run("weft drops --tenant blue --counters", on=one)
    for line in QUESTIONS:
        await story.run(line)
    await story.run(OPEN_UP)
    await _show_answer(story, source, target, port=22, passes=True)
    await story.run(CLOSE_AGAIN)
    await _show_answer(story, source, target, port=22, passes=False)


async def _kill_under_traffic(story: Demo, one: Host, two: Host, pods: dict[str, Pod]) -> None:
    stop = asyncio.Event()
    running = asyncio.ensure_future(stream(pods["blue-1"].place(), pods["blue-web"].place(), port=5000, stop=stop))
    for each in (one, two, story.lab.master):
        each.kill()
    await asyncio.gather(story.lab.master.start(), one.start(), two.start())
    stop.set()
    sent, arrived = await running
    story.console.print(f"{arrived} of {sent} packets between the hosts arrived meanwhile", highlight=False)
    if arrived != sent:
        raise DemoFailed("weft lab: packets were lost")
    await story.run("netctl endpoint ls -a")


def _is_kin(source: str, target: str) -> bool:
    """Whether two pods are of one tenant."""
    return source.partition("-")[0] == target.partition("-")[0]


def _cell(source: str, target: str) -> str:
    return "[green]yes[/]" if _is_kin(source, target) else "[red]never[/]"
