"""Fleet files as text, and what is said of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.config import ConfigError, load_fleet

GOOD = "models: [{name: a, source: org/name}]\n"


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "fleet.yaml"
    path.write_text(text)
    return path


def problems(path: Path) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_fleet(path)
    return [str(problem).removeprefix(str(path)) for problem in caught.value.problems]
