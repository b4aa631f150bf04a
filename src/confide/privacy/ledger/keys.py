"""Keys of the curator: a passphrase that a ceiling can be raised with, and signatures of heads.

A ledger carries no secret, so whoever can write to it could append a higher ceiling. A ceiling that is set with a
passphrase carries a public key made from it (scrypt, Ed25519); every looser ceiling behind it must be signed with that
key, over the chain so far, and every reader checks it. Neither the passphrase nor anything that signs is kept.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING

from confide.errors import Refusal
from confide.privacy.ledger.store import Head

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

# 128 bits cannot be guessed. A passphrase is stretched, and eight signs are the least that anybody asks for.
SHORTEST_KEY = 16
SHORTEST_PASSPHRASE = 8
# scrypt's cost: 16 MB and some 50 ms for each guess, as RFC 7914 has it for use by people.
_WORK, _BLOCK = 1 << 14, 8


@dataclass(frozen=True)
class Seal:
    """The public half of a passphrase: the salt and the Ed25519 key, in hexadecimal digits."""

    salt: str
    public: str

    def __post_init__(self) -> None:
        for name, size in (("salt", 16), ("public", 32)):
            value = getattr(self, name)
            if not isinstance(value, str) or len(value) != 2 * size or set(value) - set("0123456789abcdef"):
                raise Refusal(f"seal.{name}={value!r}: must be {2 * size} hexadecimal digits")

    @staticmethod
    def made_from(passphrase: str) -> Seal:
        """A seal with a fresh salt."""
        salt = secrets.token_hex(16)
        return Seal(salt, _public(passphrase, salt))

    def sign(self, passphrase: str, text: str) -> str:
        """The signature of the text; a wrong passphrase is refused."""
        if _public(passphrase, self.salt) != self.public:
            raise Refusal("passphrase: not the one this ceiling was set with, so it stays as it is")
        return _private(passphrase, self.salt).sign(text.encode()).hex()

    def signed(self, signature: str | None, text: str) -> bool:
        """Whether whoever signed this text knew the passphrase."""
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

        try:
            Ed25519PublicKey.from_public_bytes(bytes.fromhex(self.public)).verify(
                bytes.fromhex(signature or ""), text.encode()
            )
        except (InvalidSignature, ValueError, TypeError):
            return False
        return True


def _private(passphrase: str, salt: str) -> Ed25519PrivateKey:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    if not isinstance(passphrase, str) or len(passphrase) < SHORTEST_PASSPHRASE:
        raise Refusal(f"passphrase: must have at least {SHORTEST_PASSPHRASE} characters")
    seed = hashlib.scrypt(passphrase.encode(), salt=bytes.fromhex(salt), n=_WORK, r=_BLOCK, p=1, dklen=32)
    return Ed25519PrivateKey.from_private_bytes(seed)


def _public(passphrase: str, salt: str) -> str:
    text: str = _private(passphrase, salt).public_key().public_bytes_raw().hex()
    return text


def passphrase_of(key: bytes) -> str:
    """A key in the place of a passphrase."""
    return check_key(key).hex()


def check_key(key: bytes) -> bytes:
    """The curator's key: secret random bytes that sign heads and hide sketches of records."""
    if not isinstance(key, bytes) or len(key) < SHORTEST_KEY:
        size = f"{len(key)} bytes" if isinstance(key, bytes) else type(key).__name__
        raise Refusal(f"key: is {size}; needs at least {SHORTEST_KEY} secret bytes, such as secrets.token_bytes(32)")
    return key


def sign_head(key: bytes, identity: str, head: Head) -> str:
    """HMAC-SHA-256 of a ledger's head under the curator's key."""
    return hmac.new(check_key(key), f"confide head {identity} {head}".encode(), hashlib.sha256).hexdigest()


def head_is_signed(key: bytes, identity: str, head: Head, signature: str) -> bool:
    return hmac.compare_digest(sign_head(key, identity, head).encode(), signature.encode())
