"""Kubernetes sync with a real netmaster and a scripted API server, over restarts of both."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tests.support.kube_script import HANG, Scripted, event, listing, scripted_server
from tests.support.runtimes import run

from weft.lab.servers.etcd import running_etcd
from weft.lab.servers.masters import MasterProcess, Rest, client
from weft.lab.waiting import eventually, until

NAMESPACES = "/api/v1/namespaces"
POLICIES = "/apis/networking.k8s.io/v1/networkpolicies"
SERVICES = "/api/v1/services"
SLICES = "/apis/discovery.k8s.io/v1/endpointslices"
OBJECTS = {"kubeNamespaces": "shop", "kubePolicies": "deny", "kubeServices": "web"}


def thing(name: str, namespace: str = "", **members: Any) -> dict[str, Any]:
    labels = members.pop("labels", {})
    return {"metadata": {"name": name, "namespace": namespace, "resourceVersion": "7", "labels": labels}, **members}


def fill(server: Scripted, *policies: dict[str, Any], namespaces: tuple[str, ...] = ("shop",)) -> None:
    labels = {"io.contiv.tenant": "blue"}
    service = thing("web", "shop", spec={"clusterIPs": ["10.96.0.9"], "ports": [{"port": 80}]})
    server.lists |= {
        NAMESPACES: [listing(5, *(thing(name, labels=labels) for name in namespaces))],
        POLICIES: [listing(5, *policies)],
        SERVICES: [listing(5, service)],
        SLICES: [listing(5)],
    }


async def names(rest: Rest, plural: str) -> list[str]:
    found: list[dict[str, Any]] = (await rest.get(plural)).accepted()
    return [each["name"] for each in found]


async def shows(rest: Rest, plural: str, *expected: str) -> None:
    await eventually(lambda: names(rest, plural), lambda found: found == list(expected))


async def test_kubernetes_objects_stay_in_sync_over_restarts_of_both(tmp_path: Path) -> None:
    async with scripted_server() as server:
        fill(server, thing("deny", "shop", spec={"podSelector": {}}))
        new = thing("later", "shop", spec={"podSelector": {}})
        server.watches[POLICIES] = [[event("ADDED", new), HANG]]
        contiv = tmp_path / "contiv.json"
        contiv.write_text(f'{{"K8S_API_SERVER": "{server.url}", "K8S_TOKEN": "word"}}')
        async with MasterProcess(tmp_path, "--mode", "kubernetes", "--contiv-json", str(contiv)) as master:
            async with client(master.url) as rest:
                await shows(rest, "kubePolicies", "deny", "later")
                await shows(rest, "kubeNamespaces", "shop")
                (service,) = (await rest.get("kubeServices")).accepted()
                assert (service["tenantName"], service["namespace"]) == ("blue", "shop")
            master.kill()
            fill(server, thing("deny", "shop", spec={"podSelector": {}}), namespaces=("shop", "new"))
            await master.start()
            async with client(master.url) as rest:
                await shows(rest, "kubePolicies", "deny")
                await shows(rest, "kubeNamespaces", "new", "shop")
                assert "weft_kube_informer_errors 0.0" in (await rest.send("GET", "/metrics")).body
    # Without the API server nothing is deleted, and everything else is served.
    master = MasterProcess(tmp_path, "--mode", "kubernetes", "--contiv-json", str(contiv))
    async with master, client(master.url) as rest:
        assert await names(rest, "kubePolicies") == ["deny"]
        await eventually(
            lambda: rest.send("GET", "/metrics"), lambda reply: "weft_kube_informer_errors 4.0" in reply.body
        )
        (await rest.put("tenants", tenantName="red")).accepted()


async def test_kubernetes_objects_are_purged_on_request_only(tmp_path: Path) -> None:
    """A netmaster in the wrong mode must not lift the isolation of policies."""
    async with scripted_server() as server:
        fill(server, thing("deny", "shop", spec={"podSelector": {}}))
        contiv = tmp_path / "contiv.json"
        contiv.write_text(f'{{"K8S_API_SERVER": "{server.url}", "K8S_TOKEN": "word"}}')
        async with MasterProcess(tmp_path, "--contiv-json", str(contiv), "--mode", "kubernetes") as master:
            async with client(master.url) as rest:
                for plural, name in OBJECTS.items():
                    await shows(rest, plural, name)
                assert "--mode" in (await rest.send("DELETE", "/api/v1/kubernetes")).refused(409)
            master.kill()
            await master.start("--mode", "cni")
            async with client(master.url) as rest:
                (await rest.put("tenants", tenantName="red")).accepted()
                for plural, name in OBJECTS.items():
                    assert await names(rest, plural) == [name]
                assert "netctl purge-kubernetes" in master.log.read_text()
                netctl = (sys.executable, "-m", "weft.ctl.netctl.main", "--netmaster", master.url)
                before = await rest.state()
                code, text = await run(*netctl, "purge-kubernetes")
                assert code == 6
                assert "1 NetworkPolicy" in text
                assert "--force" in text
                code, text = await run(*netctl, "purge-kubernetes", "--dry-run")
                assert (code, text.splitlines()[-1]) == (0, "would purge 3 objects")
                assert "would lift NetworkPolicy shop/deny" in text
                assert await rest.state() == before
                purged = await run(*netctl, "purge-kubernetes", "--force")
                assert purged == (0, "purged 3 objects\n")
                for plural in OBJECTS:
                    assert await names(rest, plural) == []
                assert [each["key"] for each in (await rest.get("tenants")).accepted()] == ["default", "red"]
                again = (await rest.send("DELETE", "/api/v1/kubernetes")).accepted()
                assert again == {"purged": 0}


def wide(name: str, cidrs: int) -> dict[str, Any]:
    """A policy that allows the pods of `shop` egress to so many addresses."""
    blocks = [{"ipBlock": {"cidr": f"10.{n >> 16}.{n >> 8 & 255}.{n & 255}/32"}} for n in range(cidrs)]
    return thing(name, "shop", spec={"podSelector": {}, "policyTypes": ["Egress"], "egress": [{"to": blocks}]})


async def test_a_policy_too_large_for_the_store_blocks_no_other(tmp_path: Path) -> None:
    """By etcd's limit, by that of gRPC before it, and by ours: it is stored without rules, an Event reports it, and
    netmaster stays the leader."""
    small_requests = ("--max-request-bytes", "200000")
    async with scripted_server() as server, running_etcd(tmp_path / "etcd", options=small_requests) as etcd:
        policies = [wide("etcd", 6_000), wide("grpc", 22_000), wide("ours", 40_000)]
        fill(server, *policies, thing("other", "office", spec={"podSelector": {}}), namespaces=("office", "shop"))
        contiv = tmp_path / "contiv.json"
        contiv.write_text(f'{{"K8S_API_SERVER": "{server.url}", "K8S_TOKEN": "word"}}')
        flags = ("--mode", "kubernetes", "--contiv-json", str(contiv), "--etcd-endpoints", etcd.endpoints[0])
        patient = ("--leader-ttl", "600")  # a busy machine takes no leadership away
        async with MasterProcess(tmp_path, *flags, *patient) as master, client(master.url) as rest:
            await shows(rest, "kubePolicies", "other", "etcd", "grpc", "ours")
            other, *large = (await rest.get("kubePolicies")).accepted()
            assert not other.get("fault")
            for each in large:
                assert "larg" in each["fault"] or "split it" in each["fault"]
                assert each["spec"] == {"podSelector": {}, "policyTypes": ["Egress"]}
            await until(lambda: {"etcd", "grpc", "ours"} <= events(server, "UnsupportedRules"))
            await until(lambda: "other" in events(server, "Realized"))
            log = master.log.read_text()
    assert "leadership lost" not in log
    assert log.count("leading address") == 1


def events(server: Scripted, reason: str) -> set[str]:
    """The policies with an Event of this reason."""
    return {
        body["involvedObject"]["name"]
        for method, _, body in server.posted
        if method == "POST" and body.get("reason") == reason
    }
