"""What tests of callers share: a fleet that asks for keys, and requests with one."""

from __future__ import annotations

import asyncio
from pathlib import Path

from gateway.identity.keyring import POLL_EVERY
from gateway.identity.store import KEYS_FILE

KEYS = {"auth": {"mode": "keys"}}
EFFECTIVE = 0.5  # seconds within which a change must hold


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def seen() -> None:
    """Until every gateway looks at the store again."""
    await asyncio.sleep(POLL_EVERY)


def move(source: Path, destination: Path) -> None:
    """The store with the files that belong to it, over what is there; the gateway never finds it in part."""
    for file in sorted(source.glob(f"{KEYS_FILE}*"), key=lambda file: file.name == KEYS_FILE):
        file.replace(destination / file.name)


def written(folder: Path, pattern: str) -> bytes:
    """All that is in files so named."""
    return b"".join(path.read_bytes() for path in folder.glob(pattern))
