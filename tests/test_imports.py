"""Imports point downwards only, and what must start fast never loads torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("contracts", "kernels", "worker", "gateway", "bench", "tests")
ALLOWED = {"contracts": set(), "kernels": set(), "worker": {"kernels", "contracts"}, "gateway": {"contracts"}}
# Within the worker: a folder may import those below it. Modules directly in worker/ go by their own name.
WORKER_ALLOWED = {
    "params": {"vllm_python"},
    "vllm_python": set(),
    "config": {"spellings"},
    "spellings": set(),
    "pooling": set(),
    "ipc": {"params", "pooling"},
    "grammar": {"params", "text"},
    "request": {"ipc", "params", "grammar"},
    "model": set(),
    "weights": {"model", "pooling"},
    "text": {"params", "weights"},
    "runner": {"model", "request", "ipc", "params"},
    "engine": {"runner", "weights", "model", "request", "ipc", "pooling", "grammar", "text", "params"},
    "server": {"grammar", "text", "ipc", "params", "weights", "config", "model", "pooling"},
    "plan": {"engine", "weights"},
    "outputs": {"text", "ipc", "params"},
    "prompting": {"outputs", "text", "ipc", "params", "weights"},
    "llm": {
        "spellings",
        "prompting",
        "outputs",
        "engine",
        "text",
        "ipc",
        "params",
        "weights",
        "embed",
        "loading_bar",
        "interrupts",
        "vllm_python",
    },
    "async_llm": {
        "spellings",
        "prompting",
        "outputs",
        "text",
        "ipc",
        "params",
        "weights",
        "vllm_python",
    },
    "embed": {"engine", "interrupts", "ipc", "params", "pooling"},
    "interrupts": set(),
    "loading_bar": {"ipc"},
}


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
    return found


@pytest.mark.parametrize("package", ALLOWED)
def test_packages_import_downwards_only(package: str):
    for path in (ROOT / package).rglob("*.py"):
        ours = {name.split(".")[0] for name in imports(path)} & set(PACKAGES)
        assert ours <= ALLOWED[package] | {package}, path


@pytest.mark.parametrize("folder", WORKER_ALLOWED)
def test_worker_folders_import_downwards_only(folder: str):
    paths = [*(ROOT / "worker" / folder).rglob("*.py"), ROOT / "worker" / f"{folder}.py"]
    for path in filter(Path.exists, paths):
        parts = {name.split(".")[1] for name in imports(path) if name.startswith("worker.")}
        assert parts <= WORKER_ALLOWED[folder] | {folder}, path


@pytest.mark.parametrize(
    "module",
    [
        "contracts.options",
        "gateway.cli",
        "gateway.app",
        "worker.server.app",
        "worker.ipc.client",
        "worker.async_llm",
        "worker.text.tokenizer",
        "worker.engine.estimate",
        "worker.plan",
    ],
)
def test_torch_stays_out_of_processes_that_do_not_compute(module: str):
    code = (
        f"import sys, {module}; sys.exit(any(m in sys.modules for m in ('torch', 'triton', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
