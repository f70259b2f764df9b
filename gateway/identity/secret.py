"""API keys as text: ``pfk_<id>_<secret>``. The id is public; the whole is known to its holder only.

The secret has 256 bits of entropy, so one round of SHA-256 is all that storing it needs: there is nothing
to guess. Letters and digits only, so that a double click selects a whole key.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import string

_ID_ALPHABET = string.ascii_lowercase + string.digits
_ID_LENGTH = 10
_ALPHABET = string.ascii_letters + string.digits
_SECRET_LENGTH = 43  # 62 ** 43 > 2 ** 256

PREFIX = b"pfk_"
KEY = re.compile(rb"pfk_([a-z0-9]{%d})_[A-Za-z0-9]{%d}" % (_ID_LENGTH, _SECRET_LENGTH))
_ID = re.compile(rf"(?:pfk_)?([a-z0-9]{{{_ID_LENGTH}}})(?:_[A-Za-z0-9]*)?")


def new_key() -> tuple[str, str]:
    """(id, the whole key)"""
    key_id = "".join(secrets.choice(_ID_ALPHABET) for _ in range(_ID_LENGTH))
    return key_id, f"pfk_{key_id}_" + "".join(secrets.choice(_ALPHABET) for _ in range(_SECRET_LENGTH))


def digest(key: bytes) -> bytes:
    """What is stored of a key: SHA-256 of the whole."""
    return hashlib.sha256(key).digest()


def id_of(text: str) -> str | None:
    """The id in an id or in a whole key (someone who finds a leaked key revokes it with what he has)."""
    match = _ID.fullmatch(text.strip())
    return match[1] if match else None
