"""`python -m worker` with an engine process that has no model, for tests of the process itself.

Takes `--load-seconds S` before the worker's own options.
"""

from __future__ import annotations

import sys
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


if __name__ == "__main__":
    options: list[str] = []
    if sys.argv[1] == "--load-seconds":
        options = ["--load-seconds", sys.argv[2]]
        del sys.argv[1:3]
    command = [sys.executable, "-m", "tests.worker.fake_engine_process", *options]
    lifecycle.engine_command = lambda spec: command  # type: ignore[assignment]
    lifecycle.resolve_source = lambda model: FakeSource()  # type: ignore[assignment,return-value]
    lifecycle.TextModel.load = fake_text  # type: ignore[method-assign,assignment]
    main()
