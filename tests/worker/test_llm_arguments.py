"""What a call of LLM says of each prompt besides its text: whose cache it may use, and when it runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.worker.random_models import SMALL, write_byte_bpe, write_checkpoint
from worker import LLM, SamplingParams
from worker.engine.scheduler import Scheduler

GREEDY = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
TEXT = "The gateway has no name that is longer than this."


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    directory = tmp_path_factory.mktemp("model")
    write_checkpoint(directory, "llama", SMALL, write_byte_bpe(directory))
    with LLM(str(directory), threads=1, kv_cache_memory_bytes="8MiB", max_num_seqs=1) as llm:
        yield llm


def test_prompts_of_the_same_salt_share_pages(llm: LLM) -> None:
    def cached(prompt: Any) -> int:
        return llm.generate(prompt, GREEDY)[0].cached_tokens

    assert [cached({"prompt": TEXT, "cache_salt": salt}) for salt in ("a", "b")] == [0, 0]
    assert cached({"prompt": TEXT, "cache_salt": "a"}) > 0
    assert [cached(TEXT), cached({"prompt": TEXT, "cache_salt": None}) > 0] == [0, True]
    with pytest.raises(TypeError, match="cache_salt of a prompt must be text; it can't be int"):
        cached({"prompt": TEXT, "cache_salt": 5})
    with pytest.raises(ValueError, match="and this one has multi_modal_data, prompt; besides"):
        cached({"prompt": TEXT, "multi_modal_data": {}})


def test_prompts_run_in_the_order_of_their_priority(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []
    finish = Scheduler.finish

    def noting(self: Scheduler, request: Any, *rest: Any) -> Any:
        ended.append(request.id)
        return finish(self, request, *rest)

    monkeypatch.setattr(Scheduler, "finish", noting)
    results = llm.generate([[5, 6], [7, 8], [9, 10]], GREEDY, priority=[5, 1, 3])
    names = [f"{result.request_id}-0" for result in results]
    assert ended == [names[1], names[2], names[0]]
    with pytest.raises(ValueError, match="3 prompts but 2 priorities"):
        llm.generate([[5, 6], [7, 8], [9, 10]], GREEDY, priority=[5, 1])
