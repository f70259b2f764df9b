"""Embeddings: transformers' own states, pooled, however the prompts are cut into steps."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from tests.worker.random_models import SMALL, write_byte_bpe, write_checkpoint
from worker import LLM, SamplingParams
from worker.ipc.messages import EngineRequest
from worker.weights.pooling import find_pooling
from worker.weights.source import SourceError, resolve_source

LENGTHS = (1, 2, 15, 16, 17, 60, 61, 200, 256)
OPTIONS: dict[str, Any] = {
    "threads": 1, "max_model_len": 256, "num_gpu_blocks_override": 80, "max_num_batched_tokens": 48,
    "max_num_seqs": 6,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("embedder")


@pytest.fixture(scope="module")
def reference(folder: Path) -> PreTrainedModel:
    return write_checkpoint(folder, "qwen2", SMALL, write_byte_bpe(folder))


@pytest.fixture(scope="module")
def prompts(reference: PreTrainedModel) -> list[list[int]]:
    random = np.random.default_rng(5)
    return [random.integers(2, 250, length).tolist() for length in LENGTHS]


@torch.no_grad()
def expected(
    model: PreTrainedModel, prompt: list[int], kind: str, dimensions: int | None = None
) -> np.ndarray:
    states = model.model(torch.tensor([prompt])).last_hidden_state[0]
    vector = (states[-1] if kind == "last" else states.mean(0))[:dimensions]
    return np.asarray(vector / vector.norm())


def near(vector: np.ndarray | list[float]) -> Any:
    return pytest.approx(vector, abs=1e-4 * float(np.abs(vector).max()))


@pytest.fixture(scope="module", params=["last", "mean"])
def embedder(request: pytest.FixtureRequest, folder: Path, reference: PreTrainedModel) -> Iterator[LLM]:
    with LLM(str(folder), runner="pooling", pooling_type=request.param, **OPTIONS) as llm:
        yield llm


def test_states_are_those_of_transformers(
    embedder: LLM, reference: PreTrainedModel, prompts: list[list[int]]
) -> None:
    """Prompts of all lengths at once, in chunks that begin and end anywhere; then again on cached pages."""
    assert embedder.info.pooling is not None
    kind = embedder.info.pooling.type
    for _ in range(2):
        for prompt, result in zip(prompts, embedder.embed(prompts)):
            assert result.outputs.embedding == near(expected(reference, prompt, kind))
            assert result.prompt_token_ids == prompt
    assert embedder.check_integrity() == ""
    # Two steps in flight, as on a GPU.
    embedder._engine._depth = 2
    try:
        for prompt, result in zip(prompts, embedder.embed(prompts)):
            assert result.outputs.embedding == near(expected(reference, prompt, kind))
    finally:
        embedder._engine._depth = 1
    cached = [result.cached_tokens for result in embedder.embed(prompts)]
    assert (max(cached) > 0) == (kind == "last"), "the mean needs every token's state"
    assert embedder.stats.generation_tokens == 0


@pytest.mark.parametrize("kind", ["last", "mean"])
def test_beside_answers_that_take_its_pages(
    folder: Path, reference: PreTrainedModel, prompts: list[list[int]], kind: Any
) -> None:
    """A prompt whose pages go to answers that grow begins again, and so must its sum."""
    options = {**OPTIONS, "num_gpu_blocks_override": 20, "max_num_seqs": 4, "max_num_batched_tokens": 8}
    with LLM(str(folder), runner="pooling", pooling_type=kind, **options) as llm:
        engine = llm._engine
        answers = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
        for i in range(3):
            engine.add(EngineRequest(f"answer-{i}", prompts[3], answers, i, arrival=float(i)))
        engine.add(EngineRequest("prompt", prompts[-2], SamplingParams(), 0, arrival=9.0, pooling=kind))
        outputs = []
        while engine.has_work:
            outputs += engine.step()
        assert llm.stats.preemptions > 0
        (pooled,) = [output for output in outputs if output.request_id == "prompt"]
        assert pooled.pooled is not None
        vector = np.frombuffer(pooled.pooled, "<f4")
        assert vector / np.linalg.norm(vector) == near(expected(reference, prompts[-2], kind))
        assert sum(len(output.token_ids) for output in outputs) == 180
        assert llm.check_integrity() == ""


def test_many_more_than_run_at_a_time(
    embedder: LLM, reference: PreTrainedModel, prompts: list[list[int]]
) -> None:
    many = prompts[:5] * 8
    found = [result.outputs.embedding for result in embedder.embed(many)]
    assert found[:5] == [near(vector) for vector in found[-5:]]
    assert embedder.check_integrity() == ""


def test_text_becomes_the_tokens_of_the_tokenizer(embedder: LLM) -> None:
    assert embedder.tokenizer is not None
    (by_text,) = embedder.embed("The fleet sails on.")
    tokens = embedder.tokenizer.encode("The fleet sails on.")
    (by_tokens,) = embedder.embed(tokens)
    assert by_text.prompt_token_ids == tokens
    assert by_text.outputs.embedding == pytest.approx(by_tokens.outputs.embedding, abs=1e-6)


def test_what_offline_embedding_refuses(embedder: LLM, folder: Path) -> None:
    with pytest.raises(ValueError, match="embed"):
        embedder.generate("hi", SamplingParams(max_tokens=1))
    with pytest.raises(ValueError, match="max_model_len"):
        embedder.embed([[5] * 257])
    with pytest.raises(ValueError, match="can't be cut"):
        embedder.embed("hi", dimensions=7)
    with LLM(str(folder), **OPTIONS) as llm:
        assert llm.info.pooling is None, "nothing in the checkpoint says that it makes embeddings"
        with pytest.raises(ValueError, match="runner='pooling'"):
            llm.embed("hi")


# --- what a checkpoint says


def write_modules(folder: Path, *kinds: str, mode: str = "pooling_mode_lasttoken") -> None:
    modules = [{"idx": i, "type": f"sentence_transformers.models.{kind}"} for i, kind in enumerate(kinds)]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    modes = dict.fromkeys(("pooling_mode_cls_token", "pooling_mode_mean_tokens"), False)
    (folder / "1_Pooling" / "config.json").write_text(
        json.dumps({"word_embedding_dimension": 64, **modes, mode: True})
    )


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path, "llama", SMALL, 100)
    return tmp_path


def test_a_sentence_transformer_is_known_by_its_files(checkpoint: Path) -> None:
    assert find_pooling(resolve_source(str(checkpoint))) is None
    write_modules(checkpoint, "Transformer", "Pooling", "Normalize")
    found = find_pooling(resolve_source(str(checkpoint)))
    assert found is not None
    assert (found.type, found.normalize, found.size) == ("last", True, SMALL["hidden_size"])
    write_modules(checkpoint, "Transformer", "Pooling", mode="pooling_mode_mean_tokens")
    found = find_pooling(resolve_source(str(checkpoint)))
    assert found is not None
    assert (found.type, found.normalize) == ("mean", False)
    source = resolve_source(str(checkpoint))
    assert find_pooling(source, "generate") is None
    by_option = find_pooling(source, "auto", "last")
    assert by_option is not None
    assert by_option.type == "last"


@pytest.mark.parametrize(
    ("kinds", "mode", "said"),
    [
        (("Transformer", "Pooling", "Dense"), "pooling_mode_lasttoken", "Dense"),
        (("Transformer", "Pooling"), "pooling_mode_cls_token", "pooling_mode_cls_token"),
    ],
)
def test_what_would_give_other_vectors_is_refused(
    checkpoint: Path, kinds: tuple[str, ...], mode: str, said: str
) -> None:
    write_modules(checkpoint, *kinds, mode=mode)
    with pytest.raises(SourceError, match=said):
        find_pooling(resolve_source(str(checkpoint)))
    assert find_pooling(resolve_source(str(checkpoint)), "generate") is None


def test_layers_without_an_output_layer(tmp_path: Path, prompts: list[list[int]]) -> None:
    """As embedding models are saved: the class's name is another, and so are the tensors' names."""
    whole = write_checkpoint(tmp_path / "whole", "llama", SMALL, 400)
    whole.model.save_pretrained(tmp_path / "bare")
    write_byte_bpe(tmp_path / "bare")
    with pytest.raises(SourceError, match="output layer"):
        find_pooling(resolve_source(str(tmp_path / "bare")), "generate")
    with LLM(str(tmp_path / "bare"), **OPTIONS) as llm:
        (result,) = llm.embed([prompts[5]])
        assert result.outputs.embedding == near(expected(whole, prompts[5], "last"))


@pytest.mark.parametrize("causal", [True, False])
def test_attention_in_both_directions_is_refused(checkpoint: Path, causal: bool) -> None:
    path = checkpoint / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "is_causal": causal}))
    if causal:
        assert resolve_source(str(checkpoint))
        return
    with pytest.raises(SourceError, match="both directions"):
        resolve_source(str(checkpoint))


def test_sizes_that_a_model_was_trained_for(checkpoint: Path) -> None:
    path = checkpoint / "config.json"
    config = json.loads(path.read_text())

    def pooling(**more: Any) -> Any:
        path.write_text(json.dumps({**config, **more}))
        return find_pooling(resolve_source(str(checkpoint)), "pooling")

    assert [size for size in range(80) if pooling().allows(size)] == [64]
    listed = pooling(matryoshka_dimensions=[16, 32])
    assert [size for size in range(80) if listed.allows(size)] == [16, 32, 64]
    assert [size for size in range(80) if pooling(is_matryoshka=True).allows(size)] == list(range(1, 65))


def test_a_cut_vector_has_length_one(
    folder: Path, reference: PreTrainedModel, prompts: list[list[int]]
) -> None:
    config = folder / "config.json"
    before = config.read_text()
    config.write_text(json.dumps({**json.loads(before), "is_matryoshka": True}))
    try:
        with LLM(str(folder), runner="pooling", **OPTIONS) as llm:
            (result,) = llm.embed([prompts[4]], dimensions=24)
    finally:
        config.write_text(before)
    assert result.outputs.embedding == pytest.approx(expected(reference, prompts[4], "last", 24), abs=1e-4)
    assert np.linalg.norm(result.outputs.embedding) == pytest.approx(1, abs=1e-5)
