"""A control group whose processes the kernel ends when they want more memory than it has."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from tests.conftest import unavailable


@contextlib.contextmanager
def memory_group(limit: int) -> Iterator[Path]:
    """Its directory; `limit` in bytes. The test ends where this user can make none."""
    groups = Path("/sys/fs/cgroup")
    is_v1 = (groups / "memory").is_dir()
    group = groups / ("memory" if is_v1 else "") / f"pagefleet-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / ("memory.limit_in_bytes" if is_v1 else "memory.max")).write_text(str(limit))
    except OSError as error:
        unavailable(f"no control group for memory can be made here: {error}")
    yield group
    group.rmdir()
