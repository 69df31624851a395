"""The part of `weft lab` about services: DNS name, VIPs and load balancing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from ipaddress import ip_address

from rich.table import Table

from weft.lab.console import Demo, DemoFailed
from weft.lab.hosts import Host, Pod
from weft.lab.http_services import query_backend, serving_names
from weft.lab.traffic import IPAddress, NetnsAddress
from weft.lab.waiting import eventually

SERVICE = "shop"
CREATE = "netctl service create -t blue -s net -l app=shop -p 80:8080:TCP --wait shop"
# Name, host.
BACKENDS = (("shop-1", "one"), ("shop-2", "two"), ("shop-3", "two"))
# Enough that each of three backends gets a connection: the chance of a miss is 3 * (2/3)^60.
CONNECTIONS = 60
_RECORD_TYPES = {4: "A", 6: "AAAA"}


async def show_services(demo: Demo, hosts: Mapping[str, Host], client: Pod) -> None:
    """Create a service, resolve its name, show its load balancing, and remove one of its backends."""
    await demo.run(CREATE)
    pods = [await demo.attach(name, hosts[host], "blue", "") for name, host in BACKENDS]
    for pod in pods:
        await _label(demo, pod)
    addresses = {family: await _resolve(demo, client, record_type) for family, record_type in _RECORD_TYPES.items()}
    await _show_backends(demo, client, addresses, pods)
    removed, *rest = pods
    await removed.remove()
    demo.print(f"[bold green]-[/] {removed.name} removed: it gets no more connections")
    await _show_backends(demo, client, addresses, rest)
    for pod in rest:
        await pod.remove()


async def _label(demo: Demo, pod: Pod) -> None:
    """Send the labels of a pod, as a runtime's start event does."""
    start = {"Event": "start", "Tenant": "blue", "EndpointID": pod.name, "Labels": {"app": SERVICE}}
    (await demo.lab.rest.post("/plugin/updateEndpoint", start)).accepted()


async def _resolve(demo: Demo, client: Pod, record_type: str) -> str:
    records = await eventually(lambda: client.dig(SERVICE, record_type), lambda found: len(found) == 1)
    demo.print(f"[bold green]{client.name} $[/] dig +short {SERVICE} {record_type}\n{records[0]}")
    return records[0]


async def _connect(client: NetnsAddress, vip: IPAddress, *, times: int) -> Counter[str]:
    return Counter([await query_backend(client, vip, port=80) for _ in range(times)])


async def _show_backends(demo: Demo, client: Pod, addresses: Mapping[int, str], backends: Sequence[Pod]) -> None:
    """Print the number of connections by backend; all backends must get some, and no other pod any."""
    names = {pod.name for pod in backends}
    connections: dict[int, Counter[str]] = {}
    for family, address in addresses.items():
        async with serving_names(backends, port=8080, family=family):
            connect = partial(_connect, client.place(family), ip_address(address))
            # The nodes get the new backends asynchronously.
            await eventually(partial(connect, times=8 * len(names)), lambda found: found.keys() == names)
            connections[family] = await connect(times=CONNECTIONS)
    table = Table(f"{CONNECTIONS} connections to", *(f"{address}\nport 80" for address in addresses.values()))
    for pod in backends:
        table.add_row(f"{pod.name} on {pod.host.name}", *(str(connections[family][pod.name]) for family in addresses))
    demo.console.print(table)
    if any(counter.keys() != names for counter in connections.values()):
        raise DemoFailed(f"weft lab: unexpected backends: {connections}")
