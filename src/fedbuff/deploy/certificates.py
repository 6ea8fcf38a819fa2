"""Keys and certificates of a deployment: who the SuperLink is, and who the gateways are.

    make_authority(folder)                         # ca.crt, ca.key: it vouches for
    make_server(folder, "fl.example.org")          # server.crt, server.key: the SuperLink
    make_key(folder / "gateway-1")                 # key, key.pub: a gateway, registered with the SuperLink

Elliptic curves throughout: P-256 for TLS, P-384 for gateways, as Flower recommends. Private keys are readable by their owner
only. What exists stays, but for the server's certificate, which is made anew each time.
"""

import datetime
import ipaddress
import os
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives import serialization as form
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_DAYS_OF_AUTHORITY, _DAYS_OF_SERVER = 3650, 825
_AN_HOUR = datetime.timedelta(hours=1)  # clocks differ


def make_authority(folder: Path) -> None:
    """A certificate authority of this deployment alone."""
    if (folder / "ca.key").exists():
        return
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"fedbuff deployment {os.urandom(4).hex()}")])
    usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)  # signs certificates, nothing else
    certificate = (
        _from_now(_DAYS_OF_AUTHORITY)
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    write_secret(folder / "ca.key", _pem(key))
    (folder / "ca.crt").write_bytes(certificate.public_bytes(form.Encoding.PEM))


def make_server(folder: Path, host: str) -> None:
    """The SuperLink's certificate, for `host` and for its own machine."""
    authority = x509.load_pem_x509_certificate((folder / "ca.crt").read_bytes())
    signer = form.load_pem_private_key((folder / "ca.key").read_bytes(), None)
    assert isinstance(signer, ec.EllipticCurvePrivateKey)
    key = ec.generate_private_key(ec.SECP256R1())
    names = [general_name(name) for name in dict.fromkeys([host, "localhost", "127.0.0.1", "::1"])]
    usage = x509.KeyUsage(True, False, False, False, False, False, False, False, False)  # signs handshakes
    certificate = (
        _from_now(_DAYS_OF_SERVER)
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host[:64])]))
        .issuer_name(authority.subject)
        .public_key(key.public_key())
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(signer, hashes.SHA256())
    )
    write_secret(folder / "server.key", _pem(key))
    (folder / "server.crt").write_bytes(certificate.public_bytes(form.Encoding.PEM))


def make_key(folder: Path) -> None:
    """A gateway's key pair, in the formats of OpenSSH, which Flower reads."""
    if (folder / "key").exists():
        return
    key = ec.generate_private_key(ec.SECP384R1())
    write_secret(folder / "key", key.private_bytes(form.Encoding.PEM, form.PrivateFormat.OpenSSH, form.NoEncryption()))
    public = key.public_key().public_bytes(form.Encoding.OpenSSH, form.PublicFormat.OpenSSH)
    (folder / "key.pub").write_bytes(public + f" {folder.name}\n".encode())


def write_secret(path: Path, secret: bytes) -> None:
    """Write a file that nobody else can read at any moment."""
    path.unlink(missing_ok=True)  # else an old file's mode would stay
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as f:
        f.write(secret)


def general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _from_now(days: int) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    made = x509.CertificateBuilder().serial_number(x509.random_serial_number())
    return made.not_valid_before(now - _AN_HOUR).not_valid_after(now + datetime.timedelta(days=days))


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption())
