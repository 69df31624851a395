"""Stores, datapaths and orchestrators by name. The only importer of adapters, through entry points."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields
from importlib.metadata import entry_points
from pathlib import Path
from typing import ClassVar, Final, cast

from weft.domain.addresses import Address, Subnet
from weft.domain.errors import Unavailable
from weft.ports.datapath import Datapath, DatapathTools
from weft.ports.orchestrator import Orchestrator
from weft.ports.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryStoreSettings:
    """A store that is gone when it is closed."""

    driver: ClassVar[str] = "memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class SqliteStoreSettings:
    """The embedded store: one file, one process. At least the last `history` revisions are kept for watchers."""

    driver: ClassVar[str] = "sqlite"
    path: str
    history: int = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdStoreSettings:
    """An etcd v3 cluster: URLs of its members, and the files and words that open it."""

    driver: ClassVar[str] = "etcd"
    endpoints: tuple[str, ...]
    root: str = "/weft/"
    user: str = ""
    password: str = field(default="", repr=False)
    ca: str = ""
    cert: str = ""
    key: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteStoreSettings:
    """The store behind netmaster: `unix:PATH` or `https://HOST:PORT` of one or more, and who we are to them."""

    driver: ClassVar[str] = "remote"
    endpoints: tuple[str, ...]
    node: str
    ca: str = ""
    cert: str = ""
    key: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesSettings:
    """The way to an API server: by a kubeconfig, by Contiv's file, or as a pod; `servers` go before theirs."""

    driver: ClassVar[str] = "kubernetes"
    kubeconfig: Path | None = None
    contiv: Path | None = None
    servers: tuple[str, ...] = ()


StoreSettings = MemoryStoreSettings | SqliteStoreSettings | EtcdStoreSettings | RemoteStoreSettings


def open_store(settings: StoreSettings) -> Store:
    """The store as the settings say; opened when it is entered as an async context manager."""
    members = {each.name: getattr(settings, each.name) for each in fields(settings)}
    return cast("Store", _find("weft.stores", settings.driver)(**members))


def find_orchestrator(settings: KubernetesSettings) -> Orchestrator:
    """The orchestrator as the settings say; `Invalid` when they do not lead to one. Nobody is asked yet."""
    members = {each.name: getattr(settings, each.name) for each in fields(settings)}
    return cast("Orchestrator", _find("weft.orchestrators", settings.driver)(**members))


@dataclass(frozen=True, slots=True, kw_only=True)
class LinuxDatapathSettings:
    """The plain kernel. Tenants' namespaces are pinned in the directory; `vtep` is our end of tunnels.

    `unmasked` are targets outside that see workloads by their own addresses, not by the node's. Node ports are those of
    the host's addresses in `node_port_subnets`; without any, of all.
    """

    driver: ClassVar[str] = "linux"
    directory: Path
    vtep: Address
    vxlan_port: int
    unmasked: tuple[Subnet, ...] = ()
    node_port_subnets: tuple[Subnet, ...] = ()


# Where Open vSwitch's sockets usually are.
OVS_DIR: Final = Path("/run/openvswitch")


@dataclass(frozen=True, slots=True, kw_only=True)
class OvsDatapathSettings:
    """Open vSwitch, whose sockets are in the directory `switch`; `uplinks` carry networks of VLAN tags.

    The rest is as on the plain kernel.
    """

    driver: ClassVar[str] = "ovs"
    switch: Path
    directory: Path
    vtep: Address
    vxlan_port: int
    uplinks: tuple[str, ...] = ()
    unmasked: tuple[Subnet, ...] = ()
    node_port_subnets: tuple[Subnet, ...] = ()


DatapathSettings = LinuxDatapathSettings | OvsDatapathSettings


def open_datapath(settings: DatapathSettings) -> AbstractContextManager[Datapath]:
    """The datapath as the settings say; opened when it is entered, on the thread that is to use it."""
    members = {each.name: getattr(settings, each.name) for each in fields(settings)}
    return cast("AbstractContextManager[Datapath]", _find("weft.datapaths", settings.driver)(**members))


def datapath_tools(name: str) -> DatapathTools:
    """What the datapath of that name offers without being opened."""
    return cast("DatapathTools", _find("weft.datapaths", name))


def _find(group: str, name: str) -> Callable[..., object]:
    found = entry_points(group=group, name=name)
    if not found:
        raise Unavailable(f"there is no {name!r} among {group}: is Weft installed whole?")
    (entry_point,) = found
    return cast("Callable[..., object]", entry_point.load())
