from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import kernels

ROOT = Path(kernels.__file__).resolve().parent.parent


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_transformers_survives_a_package_of_this_name() -> None:
    """It imports `kernels` when there is one, and asks a published package of that name for its version."""
    code = (
        "import kernels, transformers.integrations; from transformers import LlamaForCausalLM;"
        "assert not hasattr(kernels, '__version__'); print(kernels.__file__)"
    )
    assert Path(run(code)) == ROOT / "kernels" / "__init__.py"


def test_importing_the_package_imports_nothing_heavy() -> None:
    heavy = ("torch", "triton", "numpy")
    assert run(f"import sys, kernels, kernels.batch; print([m for m in {heavy} if m in sys.modules])") == "[]"


def test_importing_transformers_does_not_compile_or_import_our_kernels() -> None:
    code = "import sys, transformers; print([m for m in sys.modules if m.startswith('kernels.')])"
    assert run(code) == "[]"
