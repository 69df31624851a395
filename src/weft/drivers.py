"""Stores, datapaths and orchestrators by name. The only module that loads adapters, through entry points."""

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
from weft.ports.store import SharedStore, Store


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryStoreSettings:
    """A store that is not persistent."""

    # The name of the entry point.
    driver: ClassVar[str] = "memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class SqliteStoreSettings:
    """The embedded store: one file for one process. At least the last `history` revisions are kept for watchers."""

    driver: ClassVar[str] = "sqlite"
    path: str
    history: int = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdStoreSettings:
    """An etcd v3 cluster: URLs of its members, credentials and TLS files."""

    driver: ClassVar[str] = "etcd"
    endpoints: tuple[str, ...]
    # The prefix of all keys: the cluster can be shared with other programs.
    root: str = "/weft/"
    user: str = ""
    password: str = field(default="", repr=False)  # never in logs
    ca: str = ""
    cert: str = ""
    key: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteStoreSettings:
    """The store behind netmaster: `unix:PATH` or `https://HOST:PORT` of one or more, and our node name."""

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
    """The store of the settings; it is opened when it is entered as an async context manager."""
    members = _members(settings)
    return cast("Store", _find("weft.stores", settings.driver)(**members))


def open_shared_store(settings: EtcdStoreSettings) -> SharedStore:
    """The same for a store that has users and roles."""
    return cast("SharedStore", open_store(settings))


def find_orchestrator(settings: KubernetesSettings) -> Orchestrator:
    """The orchestrator of the settings; `Invalid` if they are not usable. It does not connect yet."""
    members = _members(settings)
    return cast("Orchestrator", _find("weft.orchestrators", settings.driver)(**members))


@dataclass(frozen=True, slots=True, kw_only=True)
class LinuxDatapathSettings:
    """The Linux kernel datapath. Tenant namespaces are pinned in the directory; `vtep` is our tunnel endpoint.

    Traffic to `nat_exclude` destinations is not masqueraded: they see the addresses of workloads. Node ports listen on
    the host addresses in `node_port_subnets`, by default on all. `reserved_ports` (protocol, port) are never translated
    at the host's own addresses.
    """

    driver: ClassVar[str] = "linux"
    directory: Path
    vtep: Address
    vxlan_port: int
    nat_exclude: tuple[Subnet, ...] = ()
    node_port_subnets: tuple[Subnet, ...] = ()
    reserved_ports: tuple[tuple[int, int], ...] = ()


# The default directory of Open vSwitch's sockets.
OVS_DIR: Final = Path("/run/openvswitch")


@dataclass(frozen=True, slots=True, kw_only=True)
class OvsDatapathSettings:
    """The Open vSwitch datapath; `switch` is the directory of its sockets, `uplinks` carry VLAN networks.

    The other settings are those of the Linux datapath.
    """

    driver: ClassVar[str] = "ovs"
    switch: Path
    directory: Path
    vtep: Address
    vxlan_port: int
    uplinks: tuple[str, ...] = ()
    nat_exclude: tuple[Subnet, ...] = ()
    node_port_subnets: tuple[Subnet, ...] = ()
    reserved_ports: tuple[tuple[int, int], ...] = ()


DatapathSettings = LinuxDatapathSettings | OvsDatapathSettings


def open_datapath(settings: DatapathSettings) -> AbstractContextManager[Datapath]:
    """The datapath of the settings; it is opened when it is entered, on the thread that uses it."""
    members = _members(settings)
    return cast("AbstractContextManager[Datapath]", _find("weft.datapaths", settings.driver)(**members))


def datapath_tools(name: str) -> DatapathTools:
    """The operator tools of a datapath, without opening it."""
    return cast("DatapathTools", _find("weft.datapaths", name))


def _members(settings: StoreSettings | KubernetesSettings | DatapathSettings) -> dict[str, object]:
    # Not asdict(): it would copy nested values, and settings are passed on as they are.
    return {field.name: getattr(settings, field.name) for field in fields(settings)}


def _find(group: str, name: str) -> Callable[..., object]:
    # Entry points, so that an adapter can be installed separately, and is imported only when it is used.
    found = entry_points(group=group, name=name)
    if not found:
        raise Unavailable(f"no entry point {name!r} in group {group}: reinstall Weft or install the adapter")
    (entry_point,) = found
    return cast("Callable[..., object]", entry_point.load())
