"""A certificate authority of our own, by which netmaster and nodes know each other; and what a certificate says.

Keys never leave the machine that made them: who wants a certificate sends a request, signed by its key. A key and its
certificate are one file, so that nobody meets the one without the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple, Self

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from weft.cni.files import place_file
from weft.domain.errors import Invalid, Malformed
from weft.runtime.join_wire import NAME_URI, named_by

AUTHORITY_LIFE = timedelta(days=3650)
# Clocks of machines differ: a certificate is good from a little before it was made.
_SKEW = timedelta(minutes=5)
_PRIVATE = 0o600
# By X.509.
_LONGEST_COMMON_NAME = 64


class Request(NamedTuple):
    """A new key, and the request that it has signed; both in PEM."""

    key: bytes
    text: bytes


def new_request(name: str) -> Request:
    """A key of its own for whoever is called so, and its request for a certificate."""
    key = ec.generate_private_key(ec.SECP256R1())
    request = x509.CertificateSigningRequestBuilder().subject_name(_named(name)).sign(key, hashes.SHA256())
    return Request(_private(key), request.public_bytes(serialization.Encoding.PEM))


def read_end(certificate: bytes) -> datetime:
    """When the first certificate in a PEM text ends; `Invalid` where there is none."""
    try:
        return x509.load_pem_x509_certificate(certificate).not_valid_after_utc
    except ValueError as error:
        raise Invalid(f"this is no certificate: {error}") from error


def read_name(certificate: bytes) -> str:
    """Whom the first certificate in a PEM text is for; `Invalid` where there is none, or it names nobody."""
    try:
        read = x509.load_pem_x509_certificate(certificate)
        uris = _alternative_names(read).get_values_for_type(x509.UniformResourceIdentifier)
    except ValueError as error:
        raise Invalid(f"this is no certificate: {error}") from error
    name = named_by(uris, (str(each.value) for each in read.subject.get_attributes_for_oid(NameOID.COMMON_NAME)))
    if not name:
        raise Invalid(f"the certificate of {read.subject.rfc4514_string()!r} names nobody")
    return name


class Authority:
    """Signs for servers and clients. What it has signed is known by `ca`, its own certificate in PEM."""

    def __init__(self, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> None:
        self._key = key
        self._certificate = certificate
        self.ca = certificate.public_bytes(serialization.Encoding.PEM)

    @classmethod
    def open(cls, file: Path) -> Self:
        """The authority that a file keeps; made at the first time. `Invalid` when the file is something else."""
        if not file.exists():
            place_file(file, _new_authority(datetime.now(UTC)), mode=_PRIVATE)
        text = file.read_bytes()
        try:
            key = serialization.load_pem_private_key(text, password=None)
            certificate = x509.load_pem_x509_certificate(text)
        except ValueError as error:
            raise Invalid(f"{file} is not the authority that was kept there: {error}") from error
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise Invalid(f"{file} has a key of another kind than ours")
        return cls(key, certificate)

    def sign(
        self, request: bytes, *, name: str, life: timedelta, now: datetime, addresses: Sequence[str] = ()
    ) -> bytes:
        """A certificate in PEM for the key that has signed a request; `Malformed` when none has.

        Who it is for is said by `name`, never by the request; `addresses` are those of a server.
        """
        try:
            asked = x509.load_pem_x509_csr(request)
            if not asked.is_signature_valid:
                raise Malformed("the request for a certificate is not signed by its own key")
        except (ValueError, InvalidSignature) as error:
            raise Malformed(f"this is no request for a certificate: {error}") from error
        usages = [ExtendedKeyUsageOID.CLIENT_AUTH]
        builder = _builder(name, now=now, life=life).issuer_name(self._certificate.subject)
        if addresses:
            usages.append(ExtendedKeyUsageOID.SERVER_AUTH)
        names = [
            x509.UniformResourceIdentifier(NAME_URI + name),
            *(x509.IPAddress(ip_address(each)) for each in addresses),
        ]
        is_only_name = not list(_named(name))
        builder = (
            builder.public_key(asked.public_key())
            .add_extension(x509.SubjectAlternativeName(names), critical=is_only_name)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
        )
        return builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def _new_authority(now: datetime) -> bytes:
    key = ec.generate_private_key(ec.SECP256R1())
    usage = x509.KeyUsage(
        digital_signature=False, content_commitment=False, key_encipherment=False, data_encipherment=False,
        key_agreement=False, key_cert_sign=True, crl_sign=True, encipher_only=False, decipher_only=False,
    )  # fmt: skip
    name = f"weft {x509.random_serial_number():x}"[:64]  # the number tells one authority from the next
    certificate = (
        _builder(name, now=now, life=AUTHORITY_LIFE)
        .issuer_name(_named(name))
        .public_key(key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    return _private(key) + certificate.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def _builder(name: str, *, now: datetime, life: timedelta) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(_named(name))
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(now + life)
    )


def _named(name: str) -> x509.Name:
    """The name as a subject; an empty one where it does not fit, since a part of it may be another's name."""
    fits = len(name) <= _LONGEST_COMMON_NAME
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)] if fits else [])


def _alternative_names(certificate: x509.Certificate) -> x509.SubjectAlternativeName:
    try:
        return certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return x509.SubjectAlternativeName([])


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
