"""`python -m worker --model …`: one model served over HTTP, in the foreground."""

from __future__ import annotations

import logging
import os
import sys

from worker.config import read_config_or_exit


def main() -> None:
    """Read options, serve, exit: 0 stopped on request, 1 failed, 2 invalid options, address or model."""
    config = read_config_or_exit(sys.argv[1:])
    logging.basicConfig(
        level=logging.INFO,
        format=f"%(asctime)s %(levelname)s {config.model_names[0]}: %(message)s",
        stream=sys.stderr,
    )
    # uvicorn's own account of starting and stopping repeats ours.
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    # Heavy imports come after the options have been checked: --help and mistakes answer at once.
    from worker.server.lifecycle import run_worker

    code = run_worker(config)
    logging.shutdown()
    os._exit(code)


if __name__ == "__main__":
    main()
