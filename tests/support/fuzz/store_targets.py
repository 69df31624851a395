"""Parsers of what a store holds and says: documents, keys, etcd's and netmaster's protocols, backups, certificates."""

from __future__ import annotations

import base64
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec
from tests.support.fuzz.engine import Parse, Target
from tests.support.fuzz.inputs import SEPARATOR, collect, finish, pieces, split
from tests.support.fuzz.mutations import Form

from weft.adapters.stores import etcd_gateway, etcd_wire, remote
from weft.adapters.stores.etcd import EtcdStore
from weft.adapters.stores.remote import RemoteStore
from weft.domain import codec, kinds, model
from weft.domain.cluster import Cluster
from weft.domain.errors import Invalid, Malformed, Unavailable, WeftError
from weft.domain.ids import EndpointId, GroupName, NetworkName, NodeName, PolicyName, RuleId, StoreKey, TenantName
from weft.domain.lifecycle.store_format import FORMAT
from weft.domain.loadbalancer.kube_objects import EndpointSlice, KubeService, KubeSlice, ServiceObject
from weft.domain.policy.compile.kube_objects import KubeNamespace, KubePolicy
from weft.domain.policy.engine.engine import Engine
from weft.domain.policy.engine.engine_sync import sync_object
from weft.domain.policy.model.netpol import PolicySpec
from weft.domain.store_types import Change, Entry, Event, Listing
from weft.domain.validation import check
from weft.master.api.backup import Backup, check_backup
from weft.ports.store import Compare, Write
from weft.runtime import ca
from weft.runtime.http_failover import Servers, Stream, TryNextServer
from weft.runtime.join_wire import Joined
from weft.runtime.store import wire

T = TypeVar("T")

_DEFAULT, _BLUE = TenantName("default"), NetworkName("blue")
_VALUES: tuple[Any, ...] = (
    model.Tenant(name=_DEFAULT, default_network="blue", external_ranges=("10.0.0.0/8",)),
    model.Network(
        tenant=_DEFAULT,
        name=_BLUE,
        encap="vxlan",
        subnet="10.1.0.0/16",
        gateway="10.1.0.1",
        tags=model.NetworkTags(vlan=5, vni=7),
    ),
    model.Group(
        tenant=_DEFAULT,
        name=GroupName("web"),
        network=_BLUE,
        ip_pool="10.1.0.10-10.1.0.20",
        policies=(PolicyName("p"),),
        group_id=3,
    ),
    model.Policy(tenant=_DEFAULT, name=PolicyName("p")),
    model.Rule(
        tenant=_DEFAULT,
        policy=PolicyName("p"),
        rule_id=RuleId("1"),
        direction="in",
        protocol="tcp",
        port=80,
        action="allow",
        from_ip_address="10.0.0.0/8",
    ),
    model.Service(
        tenant=_DEFAULT,
        name=cast("Any", "s"),
        network=_BLUE,
        selectors=("a=b",),
        ports=("80:8080:TCP",),
        vip="10.1.0.9",
    ),
    model.Global(),
    model.BgpPeer(hostname=NodeName("n1"), router_ip="50.1.1.2/24", as_number="65002", neighbor_as="500"),
    model.Endpoint(
        tenant=_DEFAULT,
        network=_BLUE,
        endpoint_id=EndpointId("e1"),
        group="web",
        ip_address="10.1.0.12",
        mac_address="02:02:0a:01:00:0c",
        host="n1",
        vtep_ip="192.0.2.1",
        labels={"a": "b"},
        pod=model.PodIdentity(namespace="ns", name="p", ports=(model.PodPort("http", 6, 80),)),
    ),
    model.Node(name=NodeName("n1"), ctrl_ip="192.0.2.1", vtep_ip="192.0.2.1"),
    KubeNamespace(name="ns", labels={"a": "b"}),
    KubePolicy(namespace="ns", name="p", uid="u", spec=PolicySpec()),
    KubeService(tenant=_DEFAULT, namespace="ns", name="s", service=ServiceObject()),
    KubeSlice(tenant=_DEFAULT, namespace="ns", service_name="s", name="s-1", slice=EndpointSlice(address_type="IPv4")),
)
_KIND_OF = {kind.type: kind for kind in kinds.ALL}
_OTHERS: Mapping[str, bytes] = {
    "claims/addresses/default/blue/0a01000c": codec.encode(model.Claim(holder="endpoints/default/blue/e1")),
    "claims/vni/7": codec.encode(model.Claim(holder="networks/default/blue")),
    "blocks/default/blue/0a010100": codec.encode(model.Block(owner="n1")),
    "alive/nodes/n1": b"n1",
    "alive/masters/127.0.0.1:9999": b"",
    "leader": b"127.0.0.1:9999",
    "restore": b"running",
    "format": b"2",
    "status/nodes/n1/applied": codec.encode(model.SyncStatus(revision=7, faults=("x",))),
    "requests/sync": b"",
}


def stored_samples() -> dict[StoreKey, bytes]:
    """A key of every class, with a valid value."""
    objects = {
        _KIND_OF[type(value)].store_key(*_KIND_OF[type(value)].key_parts(value)): codec.encode(value)
        for value in _VALUES
    }
    return {**objects, **{StoreKey(key): value for key, value in _OTHERS.items()}}


def _entries() -> list[bytes]:
    return [key.encode() + SEPARATOR + value for key, value in stored_samples().items()]


def _open_cluster() -> Parse:
    """The snapshot and the policy engine of an agent, in which the valid samples stay."""
    samples = stored_samples()

    def parse(data: bytes) -> object:
        first, value = split(data)
        key = StoreKey(first.decode(errors="replace"))
        cluster, engine = Cluster(), Engine()
        cluster.replace(Listing(tuple(Entry(each, samples[each], 1) for each in samples), 1))
        cluster.apply(Change(2, (Event(key, value),)))
        for each in (key, *samples):
            try:
                sync_object(engine, cluster, each)
            except Invalid:
                continue  # it says which object cannot be compiled
        cluster.apply(Change(3, (Event(key, None),)))
        return cluster.faults

    return parse


def _open_documents() -> Parse:
    """Each document decoded as its kind, checked, and written back as netmaster would."""

    def parse(data: bytes) -> object:
        for kind in kinds.ALL:
            try:
                found = codec.read(kind.type, data)
                check(found.value)
                codec.with_unknown(codec.encode(found.value), found.unknown)
            except WeftError:
                continue
        return None

    return parse


class Script:
    """In place of `Servers`: the response to every request is the input."""

    def __init__(self, data: bytes) -> None:
        head, self.data = data[:1], data[1:]
        # The first byte chooses the status and the size of the pieces of a stream.
        number = head[0] if head else 0
        self.status = 200 if number % 4 else (400, 500, 503)[number // 4 % 3]
        self.size = (1, 7, 4096, 1 << 20)[number // 64]
        self.asked = 0

    async def ask(self, _path: str, _body: bytes = b"", *, parse: Callable[[int, bytes], T], **_: object) -> T:
        self.asked += 1
        if self.asked > 50:  # a server that says forever that there is more
            raise Unavailable("the deadline has passed")
        try:
            return parse(self.status, self.data)
        except TryNextServer as error:
            raise Unavailable(str(error)) from error

    @asynccontextmanager
    async def stream(self, _path: str, _body: bytes = b"", **_: object) -> AsyncIterator[Stream]:
        try:
            yield Stream(self.status, pieces(self.data, self.size))
        except TryNextServer as error:
            raise Unavailable(str(error)) from error


def _ask_etcd(data: bytes) -> object:
    script = Script(data)
    gateway = etcd_gateway.Gateway(cast("Servers", script), None)
    store = EtcdStore(gateway, "/weft/")
    for work in (
        lambda: finish(store.read(StoreKey("a"))),
        lambda: finish(store.list(StoreKey("a"))),
        lambda: finish(store.grant(5)),
        lambda: finish(store.keep_alive(cast("Any", 7))),
        lambda: finish(store._transact(cast("Any", _NoCommit()))),
        lambda: [[*store._changes(each.events)] for each in finish(collect(gateway.watch(cast("Any", _WATCH))))],
    ):
        try:
            work()
        except WeftError:
            continue
    return None


class _NoCommit:
    compares: tuple[Compare, ...] = ()
    writes: tuple[Write, ...] = ()


_WATCH = etcd_wire.Watch(create_request=etcd_wire.WatchCreate(key=b"a", range_end=b"b", start_revision=1))


def _etcd_answers() -> list[bytes]:
    def text(data: str) -> str:
        return base64.b64encode(data.encode()).decode()

    header = {"cluster_id": "1", "revision": "7"}
    kv = {
        "key": text("/weft/tenants/default"),
        "value": text('{"v":1,"o":{"tenantName":"default"}}'),
        "mod_revision": "5",
    }
    event = {
        "result": {
            "header": header,
            "events": [{"kv": kv}, {"type": "DELETE", "kv": {"key": kv["key"], "mod_revision": "6"}}],
        }
    }
    answers: list[object] = [
        {"header": header, "kvs": [kv, kv], "more": True, "count": "2"},
        {"header": header, "succeeded": True, "ID": "77", "TTL": "5"},
        {"result": {"header": header, "created": True}},
        event,
        {"result": {"canceled": True, "compact_revision": "9", "cancel_reason": "x"}},
        {"error": {"grpc_code": 11, "message": "compacted"}, "code": 16, "message": "etcdserver: no leader"},
        {"result": {"TTL": "3"}},
    ]
    return [b"\xff" + msgspec.json.encode(each) for each in answers] + [
        b"\xc4" + msgspec.json.encode(event) + b"\n" + msgspec.json.encode(event)
    ]


def _read_etcd_tree(data: bytes) -> object:
    return _ask_etcd(b"\xff" + data)


def _ask_netmaster(data: bytes) -> object:
    store = RemoteStore(cast("Servers", Script(data)))
    for work in (
        lambda: finish(store.read(StoreKey("a"))),
        lambda: finish(store.list(StoreKey("a"))),
        lambda: finish(store.grant(5)),
        lambda: finish(store.keep_alive(cast("Any", 7))),
        lambda: remote._error(data[1:]),
    ):
        try:
            work()
        except WeftError:
            continue
    return None


def _remote_answers() -> list[bytes]:
    key = StoreKey("tenants/default")
    answers = (
        Entry(key, b"{}", 5),
        Listing((Entry(key, b"{}", 5),), 7),
        7,
        None,
        wire.Fault("denied", "no", "x", {"a": 1}),
    )
    return [wire.encode(each) for each in answers]


def _read_frames(data: bytes) -> object:
    size = (1, 7, 4096)[data[0] % 3] if data else 1
    frames = finish(collect(wire.frames(pieces(data[1:], size))))
    return [wire.error_of(frame.fault) for frame in frames if frame.fault]


def _watch_frames() -> list[bytes]:
    change = wire.framed(
        wire.Frame(change=Change(7, (Event(StoreKey("tenants/default"), b"{}"), Event(StoreKey("a"), None))))
    )
    fault = wire.framed(wire.Frame(fault=wire.Fault("compacted", "gone")))
    return [bytes([number]) + change + wire.HEARTBEAT_FRAME + change + fault for number in range(3)]


_REQUESTS = (wire.KeyRequest, wire.CommitRequest, wire.WatchRequest, wire.GrantRequest, wire.LeaseRequest)


def _requests() -> list[bytes]:
    from weft.domain.store_types import Delete, DeleteAll, PrefixUnchangedSince, Put, RevisionEquals

    key = StoreKey("endpoints/default/blue/e1")
    commit = wire.CommitRequest(
        (RevisionEquals(key, 5), PrefixUnchangedSince(key, 7)), (Put(key, b"{}"), Delete(key), DeleteAll(key))
    )
    return [
        wire.encode(each) for each in (wire.KeyRequest(key), commit, wire.WatchRequest(key, 5), wire.GrantRequest(5.0))
    ]


def _read_requests(data: bytes) -> object:
    for kind in _REQUESTS:
        try:
            msgspec.msgpack.decode(data, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            continue
    return None


def _backups() -> list[bytes]:
    entries = {
        key: msgspec.Raw(value) for key, value in stored_samples().items() if key.split("/")[0] not in _TRANSIENT
    }
    return [msgspec.json.encode(Backup(format=FORMAT, weft="1", revision=7, entries=entries))]


_TRANSIENT = {"alive", "leader", "restore", "format", "status", "requests"}


def _open_authority() -> Parse:
    authority = ca.Authority.open(Path(tempfile.mkdtemp(prefix="weft-fuzz-")) / "ca.pem")
    now = datetime.now(UTC)

    def parse(data: bytes) -> object:
        for read in (ca.read_name, ca.read_end):
            try:
                read(data)
            except Invalid:
                continue
        return authority.sign(data, name="n1", life=timedelta(hours=1), now=now)

    return parse


def _certificates() -> list[bytes]:
    authority = ca.Authority.open(Path(tempfile.mkdtemp(prefix="weft-fuzz-")) / "ca.pem")
    request = ca.new_request("n1").text
    return [request, authority.sign(request, name="n1", life=timedelta(hours=1), now=datetime.now(UTC)), authority.ca]


def _read_joined(data: bytes) -> object:
    return codec.decode_input(Joined, data)


TARGETS = (
    Target(
        name="store-entry",
        open=_open_cluster,
        samples=_entries,
        errors=(),
        weight=0.5,
        words=(SEPARATOR, b"/", *(key.encode() for key in stored_samples())),
    ),
    Target(
        name="store-document",
        open=_open_documents,
        samples=lambda: [value for value in stored_samples().values() if value[:1] == b"{"],
        errors=(),
        form=Form.JSON,
        weight=0.7,
    ),
    Target(name="etcd-answer", open=lambda: _ask_etcd, samples=_etcd_answers, errors=(), weight=0.7),
    Target(
        name="etcd-json",
        open=lambda: _read_etcd_tree,
        samples=lambda: [each[1:] for each in _etcd_answers()[:-1]],
        errors=(),
        form=Form.JSON,
    ),
    Target(
        name="remote-store-answer",
        open=lambda: lambda data: _ask_netmaster(b"\xff" + data),
        samples=_remote_answers,
        errors=(),
        form=Form.MSGPACK,
    ),
    Target(
        name="remote-store-error",
        open=lambda: lambda data: _ask_netmaster(b"\0" + data),
        samples=_remote_answers,
        errors=(),
        form=Form.MSGPACK,
        weight=0.5,
    ),
    Target(name="remote-store-frames", open=lambda: _read_frames, samples=_watch_frames, errors=(Unavailable,)),
    Target(
        name="remote-store-request",
        open=lambda: _read_requests,
        samples=_requests,
        errors=(),
        form=Form.MSGPACK,
        weight=0.5,
    ),
    Target(name="backup", open=lambda: check_backup, samples=_backups, errors=(Malformed,), form=Form.JSON, weight=0.3),
    Target(
        name="certificate",
        open=_open_authority,
        samples=_certificates,
        errors=(Malformed, Invalid),
        weight=0.05,
        words=(b"-----BEGIN CERTIFICATE-----\n",),
    ),
    Target(
        name="join-answer",
        open=lambda: _read_joined,
        samples=lambda: [msgspec.json.encode(Joined("x"))],
        errors=(Invalid,),
        form=Form.JSON,
        weight=0.2,
    ),
)
