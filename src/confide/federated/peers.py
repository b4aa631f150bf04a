"""Peers: the parties of a secure sum, as one owner knows them. Owners exchange public keys, not the server.

    missing = 0        # parties that may be missing at a step
    colluding = 1      # parties that may tell the server everything they know
    [parties]
    north = "8520f0098930a754748b7ddcb43ef75a0dbf3a0d26381af4eba4a98eaa9b4e6a"
    south = "de9edb7d7b7dc1b4d35b61c2ece435373f8343c85b78674dadfc7e146f882b4f"

Every owner has the same file. A server that made up parties, or keys, would not be believed: a party answers about the
parties of its own file alone, and shares its noise out among as many as stand there.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from confide.errors import Refusal
from confide.mechanism.secure_sum import KEY_BYTES, Masks, Shares

MOST_PARTIES = 10_000  # every step of a party makes a mask for each of the others
_NAME = re.compile(r"[\w.-]{1,60}")


@dataclass(frozen=True)
class Peers:
    """The parties of a secure sum with their public keys, and the secret key of one of them."""

    public: Mapping[str, bytes]
    secret: bytes = field(repr=False)
    missing: int = 0
    colluding: int = 0

    def __post_init__(self) -> None:
        if len(self.public) > MOST_PARTIES or not all(_NAME.fullmatch(name) for name in self.public):
            raise Refusal(f"parties: at most {MOST_PARTIES}, with names of letters, digits, dots and hyphens")
        if any(len(key) != KEY_BYTES for key in (*self.public.values(), self.secret)):
            raise Refusal(f"parties: a key has {KEY_BYTES} bytes, {2 * KEY_BYTES} hexadecimal digits")
        if len(set(self.public.values())) < len(self.public):
            raise Refusal("parties: two of them have the same key, and would know each other's masks")
        self.shares  # noqa: B018 (refuses numbers that do not fit)
        self.own  # noqa: B018 (refuses a secret of somebody else)

    @classmethod
    def from_toml(cls, path: str | Path, secret: bytes) -> Peers:
        """The peers file, with the owner's own secret key."""
        try:
            values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
            public = {str(name): bytes.fromhex(key) for name, key in values.pop("parties").items()}
            numbers = {name: values.pop(name) for name in ("missing", "colluding") if name in values}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise Refusal(
                f"peers={str(path)!r}: cannot be read ({type(error).__name__}); see docs/federated.md"
            ) from None
        if values or any(type(number) is not int for number in numbers.values()):
            raise Refusal(f"peers={str(path)!r}: holds missing, colluding and [parties], and nothing else")
        return cls(public, secret, **numbers)

    @cached_property
    def shares(self) -> Shares:
        return Shares(len(self.public), self.missing, self.colluding)

    @cached_property
    def own(self) -> str:
        """The name of the party whose secret this is."""
        mine = public_of(self.secret)
        for name, key in self.public.items():
            if key == mine:
                return name
        raise Refusal(f"parties: none has the public key {mine.hex()}, which is that of this party's secret")

    def agreed(self) -> dict[str, Any]:
        """What all parties of a sum must say alike."""
        return {"parties": sorted(self.public), "missing": self.missing, "colluding": self.colluding}

    def masks(self, run: str, step: int, roster: Sequence[str], asked: str = "") -> Masks:
        """For a step with this roster; refused where it is not one that the owner agreed to.

        asked   digest of all that is asked at the step. Parties that were told different things (another clip, another
                lattice, on which the same whole number is less noise) have different masks, which do not cancel
        """
        known = sorted(set(roster))
        if known != list(roster) or not set(known) <= set(self.public) or self.own not in known:
            raise Refusal("roster: must list parties of the peers file, this one among them, each once and in order")
        if len(known) < self.shares.least:
            raise Refusal(
                f"roster: {len(known)} parties, and at least {self.shares.least} must take part; {self.missing} of "
                f"{len(self.public)} may be missing"
            )
        keys = {name: self._shared[name] for name in known if name != self.own}
        return Masks(self.own, keys, json.dumps(["confide secure sum", run, step, known, asked]))

    @cached_property
    def _shared(self) -> dict[str, bytes]:
        """Keys that this party and one other can make, and nobody else."""
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        mine, found = X25519PrivateKey.from_private_bytes(self.secret), {}
        for name, key in self.public.items():
            if name == self.own:
                continue
            try:
                secret = mine.exchange(X25519PublicKey.from_public_bytes(key))
            except ValueError:
                raise Refusal(f"parties: the key of {name} is none of X25519") from None
            about = " ".join(sorted((name, self.own))).encode()
            found[name] = HKDF(hashes.SHA256(), KEY_BYTES, salt=None, info=b"confide masks " + about).derive(secret)
        return found


def new_secret() -> bytes:
    """A secret key, from the operating system."""
    return os.urandom(KEY_BYTES)


def public_of(secret: bytes) -> bytes:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    return X25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw()


def facts_of(peers: Peers | None) -> dict[str, Any] | None:
    """What a server is told of the secure sum that a party takes part in."""
    if peers is None:
        return None
    return {"own": peers.own, **peers.agreed()}
