"""OpenAI's client for Node against the gateway: tests/node/smoke.mjs, unmodified package."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from openai import OpenAI

from tests.conftest import ROOT, unavailable

pytestmark = [pytest.mark.node, pytest.mark.timeout(600)]

FOLDER = ROOT / "tests" / "node"


@pytest.fixture(scope="module")
def node_modules() -> Path:
    """The locked package, installed by npm when it isn't there; its scripts are not run."""
    modules = FOLDER / "node_modules"
    locked, installed = FOLDER / "package-lock.json", modules / ".package-lock.json"
    if not installed.exists() or installed.stat().st_mtime < locked.stat().st_mtime:
        command = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
        done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode != 0:
            unavailable(f"npm can't install {locked} (is there a package registry?): {done.stderr[-500:]}")
    return modules


def test_the_client_of_node(scripted: OpenAI, node_modules: Path) -> None:
    environment = {**os.environ, "BASE_URL": str(scripted.base_url), "MODEL": "scripted"}
    done = subprocess.run(
        ["node", "--test", "smoke.mjs"],
        cwd=FOLDER,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "# pass 10" in done.stdout or "ℹ pass 10" in done.stdout, done.stdout[-2000:]
