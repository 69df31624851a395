"""The chapter of `weft lab` about services: a name, its addresses, and who answers there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from ipaddress import ip_address

from rich.table import Table

from weft.lab.console import Demo, DemoFailed
from weft.lab.hosts import Host, Pod
from weft.lab.http_services import hears, saying_names
from weft.lab.traffic import IPAddress, Place
from weft.lab.waiting import eventually

SHOP = "shop"
CREATE = "netctl service create -t blue -s net -l app=shop -p 80:8080:TCP --wait shop"
# Name, host.
PROVIDERS = (("shop-1", "one"), ("shop-2", "two"), ("shop-3", "two"))
ASKED = 60
_FAMILIES = {4: "A", 6: "AAAA"}


async def show_services(story: Demo, hosts: Mapping[str, Host], client: Pod) -> None:
    """A service is made, its name resolves, its addresses balance, and one of its providers leaves."""
    await story.run(CREATE)
    pods = [await story.attach(name, hosts[host], "blue", "") for name, host in PROVIDERS]
    for pod in pods:
        await _label(story, pod)
    addresses = {family: await _resolve(story, client, kind) for family, kind in _FAMILIES.items()}
    await _show_answers(story, client, addresses, pods)
    gone, *rest = pods
    await gone.remove()
    story.tell(f"[bold green]-[/] {gone.name}: nobody is sent there any more")
    await _show_answers(story, client, addresses, rest)
    for pod in rest:
        await pod.remove()


async def _label(story: Demo, pod: Pod) -> None:
    """What a container's start tells the netmaster."""
    start = {"Event": "start", "Tenant": "blue", "EndpointID": pod.name, "Labels": {"app": SHOP}}
    (await story.lab.rest.post("/plugin/updateEndpoint", start)).accepted()


async def _resolve(story: Demo, client: Pod, kind: str) -> str:
    found = await eventually(lambda: client.dig(SHOP, kind), lambda answers: len(answers) == 1)
    story.tell(f"[bold green]{client.name} $[/] dig +short {SHOP} {kind}\n{found[0]}")
    return found[0]


async def _ask(place: Place, address: IPAddress, *, times: int) -> Counter[str]:
    return Counter([await hears(place, address, port=80) for _ in range(times)])


async def _show_answers(story: Demo, client: Pod, addresses: Mapping[int, str], providers: Sequence[Pod]) -> None:
    """A table of the answers by provider; all of them must answer, and nobody else."""
    names = {pod.name for pod in providers}
    heard: dict[int, Counter[str]] = {}
    for family, address in addresses.items():
        async with saying_names(providers, port=8080, family=family):
            ask = partial(_ask, client.place(family), ip_address(address))
            await eventually(partial(ask, times=8 * len(names)), lambda found: found.keys() == names)
            heard[family] = await ask(times=ASKED)
    table = Table(f"{ASKED} calls each", *(f"{address}\nport 80" for address in addresses.values()))
    for pod in providers:
        counts = (f"{heard[family][pod.name]} answers" for family in addresses)
        table.add_row(f"{pod.name} on {pod.host.name}", *counts)
    story.console.print(table)
    if any(counter.keys() != names for counter in heard.values()):
        raise DemoFailed(f"weft lab: the service is answered by {heard}")
