"""The SuperLink's certificate and its authority's."""

import datetime
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedbuff.deploy.doctor.finding import Finding

_SOON = 30  # days before a certificate ends


def check_certificates(folder: Path, host: str, now: datetime.datetime) -> Iterator[Finding]:
    """The SuperLink's certificate: by our authority, for its host, with its key, and not about to end."""
    try:
        from cryptography import x509
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        from fedbuff.deploy.certificates import general_name
    except ImportError:
        yield Finding("error", "certificates", "cryptography is not installed", "pip install 'fedbuff[flower]'")
        return
    about, where, anew = "certificates", folder / "certificates", "fedbuff deploy init DIR --force makes a new one"
    try:
        authority = x509.load_pem_x509_certificate((where / "ca.crt").read_bytes())
        server = x509.load_pem_x509_certificate((where / "server.crt").read_bytes())
        key = load_pem_private_key((where / "server.key").read_bytes(), None)
    except (OSError, ValueError, TypeError) as e:
        yield Finding("error", about, f"can't read ca.crt, server.crt or server.key: {e}", anew)
        return
    if key.public_key() != server.public_key():
        yield Finding("error", about, "server.key is not the key of server.crt", anew)
    try:
        server.verify_directly_issued_by(authority)
    except (InvalidSignature, ValueError, TypeError):
        yield Finding("error", about, "server.crt was not issued by ca.crt", anew)
    try:
        names = list(server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value)
    except x509.ExtensionNotFound:
        names = []
    for name in (host, "127.0.0.1"):
        if general_name(name) not in names:
            yield Finding("error", about, f"server.crt is not for {name}", f"{anew} (for another host: --host)")
    for file, certificate in (("ca.crt", authority), ("server.crt", server)):
        days = (certificate.not_valid_after_utc - now).days
        if certificate.not_valid_before_utc > now or certificate.not_valid_after_utc <= now:
            change = anew if file == "server.crt" else "remove certificates/ca.*, then --force; give gateways the new ca.crt"
            yield Finding("error", about, f"{file} is valid {_span(certificate)}, which is not now", change)
        elif days < _SOON:
            yield Finding("warning", about, f"{file} ends in {days} days", f"{anew}; restart the SuperLink")
        else:
            yield Finding("ok", about, f"{file}: {days} days left")


def _span(certificate: Any) -> str:
    return f"from {certificate.not_valid_before_utc:%Y-%m-%d} to {certificate.not_valid_after_utc:%Y-%m-%d}"
