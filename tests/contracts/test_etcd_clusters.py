"""etcd as in production: several members, TLS, passwords (W1)."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path

import pytest
from tests.support.store_chaos import under_chaos

from weft.adapters.stores.etcd import open_store
from weft.cni.files import place_file
from weft.domain.errors import Denied, Invalid, Stale, Unavailable
from weft.domain.ids import StoreKey
from weft.lab.servers.certificates import Authority, Certificate
from weft.lab.servers.etcd import Etcd, enable_authentication, running_etcd
from weft.lab.servers.processes import free_port
from weft.lab.waiting import soon, until
from weft.ports.store import NEVER, Put, RevisionEquals, Store
from weft.runtime import http_failover
from weft.runtime.client_tls import client_tls
from weft.runtime.store.mirror import EVERYTHING
from weft.testing.store_contract import take

A, B = StoreKey("a"), StoreKey("b")


def files(certificate: Certificate) -> dict[str, str]:
    return {"ca": str(certificate.ca), "cert": str(certificate.cert), "key": str(certificate.key)}


async def check_usable(store: Store) -> None:
    """Assert that writes, lists, watches and leases work."""
    since = await store.commit([], [Put(A, b"1")])
    lease = await store.grant(60)
    await store.commit([RevisionEquals(B, NEVER)], [Put(B, b"2", lease)])
    async with aclosing(store.watch(EVERYTHING, since)) as changes:
        assert [event.key for event in (await take(changes, 1))[0].events] == [B]
    await store.keep_alive(lease)
    await store.revoke(lease)
    assert [entry.key for entry in (await store.list(EVERYTHING)).entries] == [A]


class TestSeveralMembers:
    async def test_members_are_killed_in_turn(self, tmp_path: Path) -> None:
        """W1: any member serves; even the leader may be killed while we write and watch."""
        async with (
            running_etcd(tmp_path, members=3) as cluster,
            open_store(cluster.endpoints) as store,
            under_chaos(store, prefix="chaos/") as chaos,
        ):
            for member in cluster.members:
                member.kill()
                await chaos.wait_for_progress()
                member.start()
                await member.ready()

    async def test_a_member_without_a_leader_is_skipped(
        self, tmp_path: Path, etcd: Etcd, root: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It answers with an error; another endpoint is used."""
        monkeypatch.setattr(http_failover, "RETRY_TIMEOUT_S", 1.0)
        async with running_etcd(tmp_path, members=3) as cluster, open_store(cluster.endpoints[:1]) as alone:
            revision = await alone.commit([], [Put(A, b"1")])
            for member in cluster.members[1:]:
                member.kill()
            with pytest.raises(Unavailable):
                await alone.read(A)
            with pytest.raises(Unavailable):
                await alone.commit([], [Put(A, b"2")])
            async with open_store(etcd.endpoints, root=root) as healthy:
                since = (await healthy.list(EVERYTHING)).revision
            async with open_store([cluster.endpoints[0], *etcd.endpoints], root=root) as store:
                watch = asyncio.create_task(anext(store.watch(A, since)))
                await asyncio.sleep(0)  # let the watch start
                await check_usable(store)
                assert (await soon(watch)).events[0].key == A
            for member in cluster.members[1:]:
                member.start()
            await cluster.ready()
            async with aclosing(alone.watch(EVERYTHING, revision - 1)) as changes:
                assert (await take(changes, 1))[0].revision == revision

    async def test_unreachable_endpoints_are_skipped(self, etcd: Etcd, root: str) -> None:
        dead = f"http://127.0.0.1:{free_port()}"
        async with open_store([dead, *etcd.endpoints, dead], root=root) as store:
            await check_usable(store)

    async def test_no_endpoint_is_reachable(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(http_failover, "RETRY_TIMEOUT_S", 0.5)
        async with open_store([f"http://127.0.0.1:{free_port()}"]) as store:
            for refused in (store.read(A), store.list(A), store.commit([], [Put(A, b"")]), store.grant(1)):
                with pytest.raises(Unavailable):
                    await soon(refused)


class TestTls:
    @pytest.fixture
    def authority(self, tmp_path: Path) -> Authority:
        return Authority(tmp_path / "authority")

    async def test_tls_with_a_client_certificate(self, tmp_path: Path, authority: Authority) -> None:
        """W1: transport security to the store."""
        server, client = authority.issue("server", subject="/CN=etcd"), authority.issue("client", subject="/O=weft")
        async with (
            running_etcd(tmp_path / "etcd", tls=server) as cluster,
            open_store(cluster.endpoints, **files(client)) as store,
        ):
            await check_usable(store)

    async def test_a_new_ca_of_etcd_is_used_while_the_store_is_used(self, tmp_path: Path, authority: Authority) -> None:
        """etcd reads its certificate for each connection. Nothing fails before, while and after files are replaced."""
        first = authority.issue("server", subject="/CN=etcd")
        client = authority.issue("client", subject="/O=weft")
        second = Authority(tmp_path / "new").issue("server", subject="/CN=etcd")
        served = Certificate(authority.ca, tmp_path / "served.pem", tmp_path / "served.key")
        trusted = tmp_path / "trusted.pem"
        for target, source in ((served.cert, first.cert), (served.key, first.key), (trusted, first.ca)):
            place_file(target, source.read_bytes(), mode=0o600)
        async with (
            running_etcd(tmp_path / "etcd", tls=served) as cluster,
            open_store(cluster.endpoints, **{**files(client), "ca": str(trusted)}) as store,
        ):
            revision = await store.commit([], [Put(A, b"1")])
            place_file(served.key, second.key.read_bytes(), mode=0o600)
            place_file(served.cert, second.cert.read_bytes(), mode=0o600)
            assert await store.read(A)  # over the connection that is open
            place_file(trusted, second.ca.read_bytes(), mode=0o600)
            assert await soon(store.commit([], [Put(A, b"2")])) > revision
            await check_usable(store)

    async def test_connections_without_a_valid_certificate_fail(
        self, tmp_path: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(http_failover, "RETRY_TIMEOUT_S", 0.5)
        server = authority.issue("server", subject="/CN=etcd")
        foreign = Authority(tmp_path / "foreign").issue("client", subject="/O=weft")
        async with running_etcd(tmp_path / "etcd", tls=server) as cluster:
            for wrong in ({"ca": str(server.ca)}, files(foreign), {**files(foreign), "ca": str(server.ca)}):
                async with open_store(cluster.endpoints, **wrong) as store:
                    with pytest.raises(Unavailable):
                        await store.read(A)

    async def test_passwords_and_certificates_together(self, tmp_path: Path, authority: Authority) -> None:
        server, client = authority.issue("server", subject="/CN=etcd"), authority.issue("client", subject="/O=weft")
        async with running_etcd(tmp_path / "etcd", tls=server) as cluster:
            tls = client_tls(**files(client))
            assert tls is not None
            await enable_authentication(cluster.endpoints[0], user="weft", password="secret", tls=tls.current())
            async with open_store(cluster.endpoints, user="weft", password="secret", **files(client)) as store:
                await check_usable(store)


class TestPasswords:
    async def test_authentication_with_a_password(self, tmp_path: Path) -> None:
        """W1: authentication to the store."""
        async with running_etcd(tmp_path) as cluster:
            await enable_authentication(cluster.endpoints[0], user="weft", password="secret")
            async with open_store(cluster.endpoints, user="weft", password="secret") as store:
                await check_usable(store)
            async with open_store(cluster.endpoints, user="weft", password="wrong") as store:
                with pytest.raises(Denied, match="weft"):
                    await store.read(A)
            async with open_store(cluster.endpoints) as store:
                with pytest.raises((Denied, Invalid)):
                    await store.read(A)
                with pytest.raises((Denied, Invalid)):
                    await soon(anext(store.watch(EVERYTHING, 1)))

    async def test_an_expired_token_is_renewed(self, tmp_path: Path) -> None:
        """The server expires tokens after a second, and loses all of them when it restarts."""
        async with running_etcd(tmp_path, options=("--auth-token-ttl", "1")) as cluster:
            await enable_authentication(cluster.endpoints[0], user="weft", password="secret")
            async with open_store(cluster.endpoints, user="weft", password="secret") as store:
                revision = await store.commit([], [Put(A, b"1")])
                async with aclosing(store.watch(EVERYTHING, revision)) as changes:
                    for _ in range(2):
                        await cluster.restart()
                        revision = await store.commit([], [Put(A, b"2")])
                        assert (await take(changes, 1))[0].revision == revision
                        await asyncio.sleep(1.5)  # longer than the token TTL of 1 s; expiry is no event
                        revision = await store.commit([], [Put(A, b"3")])
                        assert (await take(changes, 1))[0].revision == revision

    async def test_credentials_are_ignored_until_the_server_enables_authentication(self, tmp_path: Path) -> None:
        async with (
            running_etcd(tmp_path) as cluster,
            open_store(cluster.endpoints, user="weft", password="secret") as store,
        ):
            await store.commit([], [Put(A, b"1")])
            await enable_authentication(cluster.endpoints[0], user="weft", password="secret")
            await store.commit([], [Put(A, b"2")])
            with pytest.raises(Stale):
                await store.commit([RevisionEquals(A, NEVER)], [Put(A, b"3")])

    async def test_the_password_is_not_shown(self) -> None:
        store = open_store(["http://127.0.0.1:1"], user="weft", password="secret")
        assert "secret" not in repr(vars(store._gateway)) + repr(store._gateway._credentials)


class TestLimits:
    async def test_a_commit_above_the_size_limit_is_rejected(self, etcd: Etcd, root: str) -> None:
        async with open_store(etcd.endpoints, root=root) as store:
            writes = [Put(StoreKey(f"{n:03}"), b"") for n in range(129)]
            with pytest.raises(Invalid):
                await store.commit([], writes)
            for size in (2_000_000, 3_000_000):  # above etcd's own limit, and above gRPC's
                with pytest.raises(Invalid, match="large"):
                    await store.commit([], [Put(A, bytes(size))])
            assert not (await store.list(EVERYTHING)).entries
            await store.commit([], writes[:128])

    async def test_a_listing_of_many_pages_is_of_one_revision(self, etcd: Etcd, root: str) -> None:
        async with open_store(etcd.endpoints, root=root) as store:
            for start in range(0, 2_500, 100):
                await store.commit([], [Put(StoreKey(f"{n:05}"), b"0") for n in range(start, start + 100)])
            stop = False

            async def write_forever() -> None:
                n = 0
                while not stop:
                    n += 1
                    await store.commit([], [Put(StoreKey("00000"), b"%d" % n), Put(StoreKey("02499"), b"%d" % n)])

            changing = asyncio.create_task(write_forever())
            for _ in range(5):
                listing = await store.list(EVERYTHING)
                assert [entry.key for entry in listing.entries] == [StoreKey(f"{n:05}") for n in range(2_500)]
                assert listing.entries[0].value == listing.entries[-1].value
                assert max(entry.revision for entry in listing.entries) <= listing.revision
            stop = True
            await changing

    async def test_roots_do_not_see_each_other(self, etcd: Etcd, root: str) -> None:
        async with (
            open_store(etcd.endpoints, root=f"{root}one/") as one,
            open_store(etcd.endpoints, root=f"{root}one0/") as other,
        ):
            await other.commit([], [Put(A, b"")])
            assert not (await one.list(EVERYTHING)).entries
            await one.commit([RevisionEquals(A, NEVER)], [Put(A, b"")])

    async def test_an_idle_watch_survives_many_keepalive_intervals(
        self, etcd: Etcd, root: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("weft.adapters.stores.etcd_gateway._IDLE_TIMEOUT_S", 0.05)
        async with open_store(etcd.endpoints, root=root) as store:
            since = await store.commit([], [Put(A, b"")])
            async with aclosing(store.watch(EVERYTHING, since)) as changes:
                waiting = asyncio.create_task(anext(changes))
                # An observation window of many keepalive intervals: nothing happens in it if the watch is healthy.
                await asyncio.sleep(1)
                assert not waiting.done()
                revision = await store.commit([], [Put(B, b"")])
                assert (await soon(waiting)).revision == revision
                await until(waiting.done)
