"""`python -m worker` with an engine process that has no model, for tests of the process itself.

Takes `--find-seconds S` and `--load-seconds S` before the worker's own options: how long each takes; and
`--fail once` or `--fail always`: the engine can't start, and says whether another start could help.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

from tests.worker.fake_engine import CHATML, byte_tokenizer
from worker.__main__ import main
from worker.server import lifecycle
from worker.server.text_model import TextModel
from worker.text.template import ChatTemplate


def fake_text(source: Any, config: Any) -> TextModel:
    return TextModel(byte_tokenizer(), ChatTemplate(CHATML))


class FakeSource:
    kind = "fake"

    def __init__(self, find_seconds: float, on_progress: Callable[[int, int], None]) -> None:
        if find_seconds:
            on_progress(5, 9)
            time.sleep(find_seconds)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--find-seconds", type=float, default=0.0)
    parser.add_argument("--load-seconds", default="0")
    parser.add_argument("--fail", default="no")
    times, rest = parser.parse_known_args()
    sys.argv[1:] = rest
    command = [sys.executable, "-m", "tests.worker.fake_engine_process"]
    command += ["--load-seconds", times.load_seconds, "--fail", times.fail]
    lifecycle.engine_command = lambda spec: command  # type: ignore[assignment]
    lifecycle.resolve_source = lambda _, on_progress, revision: FakeSource(times.find_seconds, on_progress)  # type: ignore[assignment,return-value]
    lifecycle.TextModel.load = fake_text  # type: ignore[method-assign,assignment]
    main()
