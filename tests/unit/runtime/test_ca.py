"""The authority: what it signs is known by its certificate, and says only what its caller said."""

from __future__ import annotations

import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from weft.domain.errors import Invalid, Malformed
from weft.lab.servers.certificates import Authority as Issuer
from weft.runtime.ca import Authority, new_request, read_end, read_name

NOW = datetime(2026, 11, 16, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)


def openssl(*words: str) -> str:
    return subprocess.run(["openssl", *words], capture_output=True, text=True, check=True, timeout=30).stdout


def test_openssl_agrees(tmp_path: Path) -> None:
    authority = Authority.open(tmp_path / "authority.pem")
    request = new_request("mallory")
    (tmp_path / "ca.pem").write_bytes(authority.ca)
    certificate = authority.sign(request.text, name="one", life=HOUR, now=datetime.now(UTC), addresses=["192.0.2.1"])
    (tmp_path / "one.pem").write_bytes(certificate)
    for purpose in ("sslclient", "sslserver"):
        openssl(
            "verify",
            "-x509_strict",
            "-purpose",
            purpose,
            "-CAfile",
            str(tmp_path / "ca.pem"),
            str(tmp_path / "one.pem"),
        )
    shown = openssl("x509", "-in", str(tmp_path / "one.pem"), "-noout", "-subject", "-ext", "subjectAltName")
    assert "CN = one" in shown
    assert "192.0.2.1" in shown


def test_a_node_is_no_server(tmp_path: Path) -> None:
    authority = Authority.open(tmp_path / "authority.pem")
    (tmp_path / "one.pem").write_bytes(authority.sign(new_request("one").text, name="one", life=HOUR, now=NOW))
    shown = openssl("x509", "-in", str(tmp_path / "one.pem"), "-noout", "-ext", "extendedKeyUsage")
    assert "Client" in shown
    assert "Server" not in shown


def test_it_is_the_same_when_it_is_opened_again(tmp_path: Path) -> None:
    file = tmp_path / "authority.pem"
    assert Authority.open(file).ca == Authority.open(file).ca
    assert file.stat().st_mode & 0o777 == 0o600
    assert Authority.open(tmp_path / "other.pem").ca != Authority.open(file).ca


def test_a_certificate_ends_when_it_was_said(tmp_path: Path) -> None:
    certificate = Authority.open(tmp_path / "a.pem").sign(new_request("one").text, name="one", life=HOUR, now=NOW)
    assert read_end(certificate) == NOW + HOUR


def test_a_certificate_names_whom_it_is_for(tmp_path: Path) -> None:
    """Whatever the request calls itself."""
    certificate = Authority.open(tmp_path / "a.pem").sign(new_request("two").text, name="one", life=HOUR, now=NOW)
    assert read_name(certificate) == "one"
    with pytest.raises(Invalid, match="not a certificate"):
        read_name(b"something else")


@pytest.mark.parametrize("length", [64, 65, 256])
def test_a_name_may_be_longer_than_a_common_name(tmp_path: Path, length: int) -> None:
    """A truncated name is never used: it may be the name of another node."""
    authority = Authority.open(tmp_path / "a.pem")
    name = "n" * length
    certificate = authority.sign(new_request(name).text, name=name, life=HOUR, now=datetime.now(UTC))
    (tmp_path / "ca.pem").write_bytes(authority.ca)
    (tmp_path / "one.pem").write_bytes(certificate)
    assert read_name(certificate) == name
    openssl("verify", "-x509_strict", "-CAfile", str(tmp_path / "ca.pem"), str(tmp_path / "one.pem"))
    subject = openssl("x509", "-in", str(tmp_path / "one.pem"), "-noout", "-subject")
    assert (name in subject) == (length == 64)
    assert ("CN" in subject) == (length == 64)


def test_a_certificate_of_before_is_read_by_its_common_name(tmp_path: Path) -> None:
    issued = Issuer(tmp_path).issue("one", subject="/OU=weft:nodes/CN=one")
    assert read_name(issued.cert.read_bytes()) == "one"
    issued = Issuer(tmp_path).issue("unnamed", subject="/O=weft")
    with pytest.raises(Invalid, match="has no node SAN"):
        read_name(issued.cert.read_bytes())


def test_what_is_no_request_is_refused(tmp_path: Path) -> None:
    authority = Authority.open(tmp_path / "a.pem")
    for text in (b"", b"-----BEGIN CERTIFICATE REQUEST-----\nAAAA\n-----END CERTIFICATE REQUEST-----\n", authority.ca):
        with pytest.raises(Malformed):
            authority.sign(text, name="one", life=HOUR, now=NOW)


def test_a_request_that_another_key_has_signed_is_refused(tmp_path: Path) -> None:
    text = bytearray(new_request("one").text)
    middle = text.rindex(b"\n-----END") - 12
    text[middle] = ord("A") if text[middle] != ord("A") else ord("B")
    with pytest.raises(Malformed):
        Authority.open(tmp_path / "a.pem").sign(bytes(text), name="one", life=HOUR, now=NOW)


def test_a_file_that_is_something_else_is_refused_and_kept(tmp_path: Path) -> None:
    file = tmp_path / "authority.pem"
    file.write_bytes(b"precious")
    with pytest.raises(Invalid, match="does not contain the CA"):
        Authority.open(file)
    assert file.read_bytes() == b"precious"
