"""A certificate authority for netmaster and nodes, and the identity in their certificates.

Private keys never leave the machine that created them: a node sends a certificate signing request. A key and its
certificate are in one file, so that no reader sees one without the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple, Self

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from weft.cni.files import place_file
from weft.domain.errors import Invalid, Malformed
from weft.runtime.join_wire import NAME_URI, named_by

# Longer than any cluster runs unattended: a new CA needs all nodes to enroll again.
AUTHORITY_LIFE = timedelta(days=3650)
# Clocks differ between machines: a certificate is valid from a little before its creation.
_SKEW = timedelta(minutes=5)
_PRIVATE = 0o600
# ub-common-name of X.509 (RFC 5280).
_LONGEST_COMMON_NAME = 64
# What reading a certificate, a request or a key raises.
_UNREADABLE = (
    ValueError, TypeError, UnsupportedAlgorithm, x509.InvalidVersion, x509.DuplicateExtension,
    x509.UnsupportedGeneralNameType,
)  # fmt: skip


class Request(NamedTuple):
    """A new private key and its certificate signing request, both in PEM."""

    key: bytes
    text: bytes


def new_request(name: str) -> Request:
    """Create a private key and a certificate signing request for a name."""
    key = ec.generate_private_key(ec.SECP256R1())
    request = x509.CertificateSigningRequestBuilder().subject_name(_named(name)).sign(key, hashes.SHA256())
    return Request(_private(key), request.public_bytes(serialization.Encoding.PEM))


def check_request(request: bytes) -> x509.CertificateSigningRequest:
    """The certificate signing request in a PEM text; `Malformed` unless it is one that is signed by its own key."""
    try:
        asked = x509.load_pem_x509_csr(request)
        is_valid = asked.is_signature_valid
    except (*_UNREADABLE, InvalidSignature) as error:
        raise Malformed(f"not a certificate signing request: {error}") from error
    if not is_valid:
        raise Malformed("the certificate signing request is not signed by its own key")
    return asked


def read_end(certificate: bytes) -> datetime:
    """The expiry of the first certificate in a PEM text; `Invalid` if there is none."""
    try:
        return x509.load_pem_x509_certificate(certificate).not_valid_after_utc
    except _UNREADABLE as error:
        raise Invalid(f"not a certificate: {error}") from error


def read_name(certificate: bytes) -> str:
    """The name in the first certificate of a PEM text; `Invalid` if there is no certificate or no name."""
    try:
        read = x509.load_pem_x509_certificate(certificate)
        uris = _alternative_names(read).get_values_for_type(x509.UniformResourceIdentifier)
        # Parsed only now: a certificate may be well-formed, and a part of it not.
        common_names = [str(each.value) for each in read.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
        units = [str(each.value) for each in read.subject.get_attributes_for_oid(NameOID.ORGANIZATIONAL_UNIT_NAME)]
    except _UNREADABLE as error:
        raise Invalid(f"not a certificate: {error}") from error
    name = named_by(uris, common_names, units=units)
    if not name:
        raise Invalid(f"certificate {read.subject.rfc4514_string()!r} has no node SAN")
    return name


class Authority:
    """Signs certificates of servers and clients. `ca` is its own certificate in PEM, which verifies them."""

    def __init__(self, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> None:
        self._key = key
        self._certificate = certificate
        self.ca = certificate.public_bytes(serialization.Encoding.PEM)

    @classmethod
    def open(cls, file: Path) -> Self:
        """Load the CA from a file; create it at the first call. `Invalid` for any other content."""
        if not file.exists():
            place_file(file, _new_authority(datetime.now(UTC)), mode=_PRIVATE)
        text = file.read_bytes()
        try:
            key = serialization.load_pem_private_key(text, password=None)
            certificate = x509.load_pem_x509_certificate(text)
        except _UNREADABLE as error:
            raise Invalid(f"{file} does not contain the CA key and certificate: {error}") from error
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise Invalid(f"{file} does not contain an EC private key")
        return cls(key, certificate)

    def sign(
        self, request: bytes, *, name: str, life: timedelta, now: datetime, addresses: Sequence[str] = ()
    ) -> bytes:
        """Sign a certificate signing request; `Malformed` if it is not signed by its own key.

        The subject is `name`, never that of the request; `addresses` become SANs of a server certificate.
        """
        asked = check_request(request)
        # netmaster is a client of other netmasters too.
        usages = [ExtendedKeyUsageOID.CLIENT_AUTH]
        builder = _builder(name, now=now, life=life).issuer_name(self._certificate.subject)
        if addresses:
            usages.append(ExtendedKeyUsageOID.SERVER_AUTH)
        names = [
            x509.UniformResourceIdentifier(NAME_URI + name),
            *(x509.IPAddress(ip_address(each)) for each in addresses),
        ]
        # RFC 5280: the SAN must be critical if the subject is empty.
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
    # RFC 5280: a CA key signs certificates and CRLs, nothing else.
    usage = x509.KeyUsage(
        digital_signature=False, content_commitment=False, key_encipherment=False, data_encipherment=False,
        key_agreement=False, key_cert_sign=True, crl_sign=True, encipher_only=False, decipher_only=False,
    )  # fmt: skip
    name = f"weft {x509.random_serial_number():x}"[:64]  # the number distinguishes the CAs of two clusters
    certificate = (
        _builder(name, now=now, life=AUTHORITY_LIFE)
        .issuer_name(_named(name))
        .public_key(key.public_key())
        # path_length=0: no intermediate CAs.
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
    """The name as a subject; empty if it is too long, because a truncated name may be that of another node."""
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
