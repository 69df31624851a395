"""Client configuration: kubeconfigs, contiv.json (contiv 1.7), and the in-cluster configuration."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from weft.adapters.kubernetes.api import Api
from weft.adapters.kubernetes.credentials import ClientConfig, load_client_config, read_contiv_json, read_kubeconfig
from weft.domain.errors import Invalid
from weft.lab.servers.certificates import Authority

KUBECONFIG = """
apiVersion: v1
kind: Config
current-context: here
clusters:
- name: one
  cluster:
    server: https://10.0.0.1:6443
    certificate-authority: pki/ca.crt
contexts:
- name: here
  context: {cluster: one, user: me}
users:
- name: me
  user: USER
"""


def kubeconfig(directory: Path, user: str, **changes: str) -> Path:
    text = KUBECONFIG.replace("USER", user)
    for old, new in changes.items():
        text = text.replace(old, new)
    path = directory / "config"
    path.write_text(text)
    return path


def test_a_kubeconfig_with_files_and_a_token(tmp_path: Path) -> None:
    client_config = read_kubeconfig(kubeconfig(tmp_path, "{tokenFile: token}"))
    assert client_config == ClientConfig(
        servers=("https://10.0.0.1:6443",), ca=tmp_path / "pki/ca.crt", token=tmp_path / "token"
    )


def test_inline_data_takes_precedence_over_files(tmp_path: Path) -> None:
    data = base64.b64encode(b"cert").decode()
    user = f"{{client-certificate: x, client-certificate-data: {data}, client-key-data: {data}}}"
    client_config = read_kubeconfig(kubeconfig(tmp_path, user))
    assert (client_config.cert, client_config.key) == (b"cert", b"cert")


@pytest.mark.parametrize(
    ("user", "changes", "field"),
    [
        ("{exec: {command: aws}}", {}, "user"),
        ("{username: me, password: you}", {}, "user"),
        ("{client-key-data: '%%%'}", {}, "client-key-data"),
        ("{}", {"current-context: here": "current-context: there"}, "current-context"),
        ("{}", {"user: me}": "user: you}"}, "context.user"),
        ("{}", {"server: https://10.0.0.1:6443": "proxy-url: x"}, "cluster.server"),
        ("{}", {"certificate-authority: pki/ca.crt": "insecure-skip-tls-verify: true"}, "cluster"),
    ],
)
def test_an_unusable_kubeconfig_is_rejected_with_the_field(
    tmp_path: Path, user: str, changes: dict[str, str], field: str
) -> None:
    with pytest.raises(Invalid) as caught:
        read_kubeconfig(kubeconfig(tmp_path, user, **changes))
    assert caught.value.field == field


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff", b"{", b"a: b: c", b"clusters: 5"])
def test_a_malformed_kubeconfig_is_rejected(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "config"
    path.write_bytes(content)
    with pytest.raises(Invalid, match="config"):
        read_kubeconfig(path)
    with pytest.raises(Invalid, match="cannot be read"):
        read_kubeconfig(tmp_path / "none")


def test_contiv_json(tmp_path: Path) -> None:
    """Without certificate and token, the pod's service account is used."""
    path = tmp_path / "contiv.json"
    path.write_text(
        '{"K8S_API_SERVER": "https://a:6443,https://b:6443", "K8S_CA": "/ca", "SVC_SUBNET": "10.96.0.0/12"}'
    )
    client_config = read_contiv_json(path, account=tmp_path)
    assert client_config == ClientConfig(
        servers=("https://a:6443", "https://b:6443"), ca=Path("/ca"), token=tmp_path / "token"
    )
    path.write_text('{"K8S_API_SERVER": "https://a:6443", "K8S_CERT": "/c", "K8S_KEY": "/k"}')
    assert read_contiv_json(path, account=tmp_path) == ClientConfig(
        servers=("https://a:6443",), cert=Path("/c"), key=Path("/k")
    )
    path.write_text('{"K8S_API_SERVER": "https://a:6443", "K8S_TOKEN": "word"}')
    assert read_contiv_json(path).token == "word"
    for text, field in (('{"K8S_API_SERVER": "https://a", "K8S_CERT": "/c"}', "K8S_CERT"), ("{}", "K8S_API_SERVER")):
        path.write_text(text)
        with pytest.raises(Invalid) as caught:
            read_contiv_json(path)
        assert caught.value.field == field


def test_a_pod_uses_the_in_cluster_server(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="--kubeconfig"):
        load_client_config(kubeconfig=None, contiv=None, environ={}, account=tmp_path)
    (tmp_path / "token").write_text("word")
    with pytest.raises(Invalid, match="--kubernetes-servers"):
        load_client_config(kubeconfig=None, contiv=None, environ={}, account=tmp_path)
    for host, url in (("10.96.0.1", "https://10.96.0.1:6443"), ("fd00::1", "https://[fd00::1]:6443")):
        environ = {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": "6443"}
        client_config = load_client_config(kubeconfig=None, contiv=None, environ=environ, account=tmp_path)
        assert client_config == ClientConfig(servers=(url,), ca=tmp_path / "ca.crt", token=tmp_path / "token")
    named = ("https://10.0.0.1:6443",)
    client_config = load_client_config(kubeconfig=None, contiv=None, environ={}, account=tmp_path, servers=named)
    assert client_config.servers == named


def test_secrets_are_not_printed() -> None:
    client_config = ClientConfig(servers=("https://a",), token="hidden-word", key=b"hidden-key")
    assert "hidden" not in repr(client_config)


async def test_certificates_from_files_and_inline_data(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "pki")
    files = authority.issue("me", subject="/CN=me")
    for client_config in (
        ClientConfig(servers=("https://127.0.0.1:1",), ca=files.ca, cert=files.cert, key=files.key),
        ClientConfig(
            servers=("https://127.0.0.1:1",),
            ca=files.ca.read_bytes(), cert=files.cert.read_bytes(), key=files.key.read_bytes(),
        ),
    ):  # fmt: skip
        async with Api(client_config):
            pass
    for bad in (
        ClientConfig(servers=("https://a",), ca=b"none"),
        ClientConfig(servers=("https://a",), ca=tmp_path / "none"),
        ClientConfig(servers=("https://a",), ca=files.ca, cert=files.ca, key=files.key),
    ):
        with pytest.raises(Invalid, match="not usable"):
            Api(bad)


@pytest.mark.parametrize("token", ["secret-token", Path("/no/such/token")])
def test_a_token_is_not_sent_over_plain_http(token: Path | str) -> None:
    """It would be readable on the way; the error names the server and not the token."""
    with pytest.raises(Invalid, match=r"http://192\.0\.2\.1") as refused:
        Api(ClientConfig(servers=("https://192.0.2.1", "http://192.0.2.1:8080"), token=token))
    assert "secret-token" not in refused.value.message
    Api(ClientConfig(servers=("http://127.0.0.1:8001",), token=token))  # kubectl proxy
