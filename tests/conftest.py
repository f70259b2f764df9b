"""Shared fixtures. What a test needs and can't get is skipped with one visible line; PAGEFLEET_FORBID_SKIP=1
makes that a failure."""

from __future__ import annotations

import compileall
import contextlib
import os
import shutil
from pathlib import Path
from typing import Any, NoReturn

import pytest

ROOT = Path(__file__).resolve().parent.parent
DEMO_MODEL = Path(os.environ.get("PAGEFLEET_DEMO_MODEL", ROOT / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"))


# The same examples each time, and no failure because a machine was busy: what fails here fails everywhere.
# `HYPOTHESIS_PROFILE=default` looks for new ones.
with contextlib.suppress(ImportError):  # the tests on a card need no hypothesis
    from hypothesis import settings

    settings.register_profile("repeatable", derandomize=True, deadline=None)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


if "PYTEST_XDIST_WORKER" in os.environ:  # several at once: threads of each would only wait for each other
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One process more than there are cores, since about half of the time a test waits for something."""
    return min(len(os.sched_getaffinity(0)) + 1, 8)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file stays in one process, which makes its fixtures once; a folder with some for the session too."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = nodeid.partition("::")[0]
            return "tests/conformance" if path.startswith("tests/conformance/") else path

    config.option.loadscopereorder = False  # those with few tests are the longest
    return ByFile(config, log)


def pytest_configure(config: pytest.Config) -> None:
    """Short folders in each process as well: a socket's path may have 107 bytes."""
    if hasattr(config, "workerinput"):
        config.option.basetemp = str(config.option.basetemp).replace("popen-gw", "")


def pytest_sessionstart() -> None:
    """Tests start hundreds of processes: with PYTHONDONTWRITEBYTECODE each would compile what it imports."""
    for package in ("contracts", "gateway", "kernels", "worker", "tests"):
        compileall.compile_dir(ROOT / package, quiet=2)


def pytest_sessionfinish() -> None:
    """What fleets that tests killed have left in memory, once their own directories are gone."""
    from gateway.fleet.statedir import LINK, MEMORY

    for link in MEMORY.glob(f"pagefleet-*/{LINK}"):
        if not os.path.lexists(link.read_text()):
            shutil.rmtree(link.parent, ignore_errors=True)


_PROGRAMS = (("redis", "redis-server"), ("nginx", "nginx"), ("systemd", "systemctl"), ("node", "npm"))


def _missing(item: pytest.Item) -> str | None:
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            return "no CUDA device"
    if item.get_closest_marker("model") and not DEMO_MODEL.exists():
        return f"no demo model at {DEMO_MODEL}; `make model` fetches it"
    for marker, program in _PROGRAMS:
        if item.get_closest_marker(marker) and shutil.which(program) is None:
            return f"{program} is not installed"
    return None


def unavailable(reason: str) -> NoReturn:
    """Ends a test for want of what this machine lacks."""
    if os.environ.get("PAGEFLEET_FORBID_SKIP"):
        pytest.fail(f"skipping is forbidden here: {reason}")
    pytest.skip(reason)


def pytest_runtest_setup(item: pytest.Item) -> None:
    reason = _missing(item)
    if reason is None:
        return
    if os.environ.get("PAGEFLEET_FORBID_SKIP") and not item.get_closest_marker("gpu"):
        pytest.fail(f"skipping is forbidden here: {reason}")
    pytest.skip(reason)


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """Path of SmolLM2-135M-Instruct as GGUF; use with the marker `model`."""
    return DEMO_MODEL


@pytest.fixture(scope="session")
def reference_tokens() -> Path:
    """Greedy float32 tokens of the demo model by transformers, eight prompts of 64 tokens."""
    return ROOT / "tests" / "data" / "smollm2-greedy-fp32.json"
