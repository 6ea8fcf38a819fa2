"""Everything from `cryptography`, in few words: sealing to a public key, locking with a shared one, deriving, signing.

HPKE (RFC 9180) makes its ephemeral key from the operating system's randomness; all other random bytes are arguments.
"""

import hmac
from collections.abc import Callable
from functools import lru_cache

from fedbuff.secagg.messages import RefusedError

try:
    from cryptography.exceptions import InvalidSignature, InvalidTag
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    from cryptography.hazmat.primitives.ciphers import Cipher as Cipher
    from cryptography.hazmat.primitives.ciphers import algorithms as algorithms
    from cryptography.hazmat.primitives.ciphers import modes as modes
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, Suite
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF
except ImportError as e:
    raise ValueError("secure aggregation needs cryptography: pip install 'fedbuff[secagg]'") from e

RandomBytes = Callable[[int], bytes]  # so many, fit for keys: os.urandom, or another in a test

SEALED = 48  # bytes that HPKE adds: an ephemeral public key and a tag

_SUITE = Suite(KEM.X25519, KDF.HKDF_SHA256, AEAD.AES_256_GCM)
_NONCE = bytes(12)  # every key is used once


# ── to a public key ──────────────────────────────────────────────────────────────────────────────────────────────────


def public(private: bytes) -> bytes:
    """The public X25519 key of a private one."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def seal(to: bytes, info: bytes, secret: bytes) -> bytes:
    """HPKE: only the holder of the private key opens it, and only with the same `info`."""
    return _SUITE.encrypt(secret, X25519PublicKey.from_public_bytes(to), info=info)


def unseal(private: bytes, info: bytes, sealed: bytes) -> bytes:
    try:
        return _SUITE.decrypt(sealed, X25519PrivateKey.from_private_bytes(private), info=info)
    except (InvalidTag, ValueError) as e:
        raise RefusedError("what was sealed does not open: it was sealed to another key, or for something else") from e


def exchange(private: bytes, other: bytes) -> bytes:
    """What two X25519 keys have in common."""
    try:
        return X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(other))
    except ValueError as e:
        raise RefusedError("not a public key") from e


# ── with a shared key ────────────────────────────────────────────────────────────────────────────────────────────────


def derive(secret: bytes, info: bytes) -> bytes:
    """HKDF-SHA256: 32 bytes for one purpose."""
    return HKDF(SHA256(), 32, None, info).derive(secret)


def lock(key: bytes, info: bytes, text: bytes) -> bytes:
    """AES-256-GCM; use a key once: the nonce is zero."""
    return AESGCM(key).encrypt(_NONCE, text, info)


def unlock(key: bytes, info: bytes, locked: bytes) -> bytes:
    try:
        return AESGCM(key).decrypt(_NONCE, locked, info)
    except (InvalidTag, ValueError) as e:
        raise RefusedError("what was locked does not open: it was changed, or made for something else") from e


def tag(key: bytes, text: bytes) -> bytes:
    """HMAC-SHA256, its first 16 bytes."""
    return hmac.digest(key, text, "sha256")[:16]


def subkey(key: bytes, text: bytes) -> bytes:
    """A key of its own for `text`, by HMAC-SHA256: HKDF's second half, enough where `key` is uniform, and ten times as fast."""
    return hmac.digest(key, text, "sha256")


# ── signatures ───────────────────────────────────────────────────────────────────────────────────────────────────────


def signer(private: bytes) -> bytes:
    """The public Ed25519 key of a private one."""
    return Ed25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def sign(private: bytes, text: bytes) -> bytes:
    return _signing(private).sign(text)


@lru_cache(maxsize=2)  # its public half is worked out anew each time, which takes as long as to sign
def _signing(private: bytes) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(private)


def signed_by(key: bytes, text: bytes, signature: bytes) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, text)
    except (InvalidSignature, ValueError):
        return False
    return True
