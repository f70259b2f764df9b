"""Checkpoints with random weights as transformers saves them, and small tokenizers of both kinds to go with
them: everything that a worker needs to serve text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from tests.worker.text_models import sentencepiece, write_directory

FAMILIES: dict[str, tuple[type[PreTrainedModel], type[Any]]] = {
    "llama": (LlamaForCausalLM, LlamaConfig),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config),
    "phi3": (Phi3ForCausalLM, Phi3Config),
}
TRAINING_TEXT = """
A fleet is several ships that sail together under one command. The gateway reads the name of the model and
finds the worker that serves it; the worker reads the prompt, page by page, and answers token by token. When
a worker dies, its requests hear of it at once, and the fleet sails on. Die Flotte fährt weiter, ¿verdad?
1, 2, 3, 5, 8, 13, 21, 34: every number is the sum of the two before it.
"""
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
}


def randomise(model: nn.Module) -> None:
    """Weights under which every tensor matters and greedy text doesn't repeat itself."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        values = torch.randn(parameter.shape, generator=generator)
        if name.endswith("bias"):
            values *= 0.5
        elif "norm" in name:
            values = 1 + 0.2 * values
        elif "embed" in name:
            values *= 0.05
        else:
            values *= 2.0 / parameter.shape[1] ** 0.5
        parameter.data.copy_(values)


def write_byte_bpe(directory: Path, vocab_size: int = 400) -> int:
    """A byte-level BPE with ChatML's marks and template in `directory`; the number of its tokens."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken("<|im_start|>"), AddedToken("<|im_end|>")],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([TRAINING_TEXT], trainer)
    directory.mkdir(exist_ok=True)
    backend.save(str(directory / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "chat_template": CHATML}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return backend.get_vocab_size()


def write_sentencepiece(directory: Path) -> int:
    """A SentencePiece vocabulary, which writes a space before the first word; the number of its tokens."""
    tokenizer = sentencepiece()
    write_directory(directory, tokenizer, bos_token="<s>", eos_token="</s>", add_bos_token=True)
    return tokenizer.vocab_size


def write_checkpoint(
    directory: Path, family: str, shape: dict[str, Any], tokens: int, padding: int = 0
) -> PreTrainedModel:
    """Random weights of a family beside a tokenizer of so many tokens; the same model in transformers.

    The model has `padding` rows more than the tokenizer has tokens, and finds them likelier than any other.
    """
    model_class, config_class = FAMILIES[family]
    limits = {"max_position_embeddings": 32768, "vocab_size": tokens + padding}
    ids = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    with torch.random.fork_rng():
        model = model_class(config_class(**{**limits, **ids, **shape})).eval()
    randomise(model)
    if padding:
        with torch.no_grad():
            model.get_output_embeddings().weight[tokens:] *= 100
    model.save_pretrained(directory)
    return model


class Oracle:
    """What transformers would say, with padded rows out of the way."""

    def __init__(self, model: PreTrainedModel, tokens: int) -> None:
        self._model = model
        self._tokens = tokens

    @torch.no_grad()
    def logits(self, ids: list[int]) -> Tensor:
        """[len(ids), tokens]."""
        return self._model(torch.tensor([ids]), use_cache=False).logits[0, :, : self._tokens]

    def clear_greedy(self, prompt: list[int], answer: list[int]) -> list[int]:
        """The greedy choice at every place of `answer`, up to the first that is a tie (a gap below 1e-3)."""
        best = self.logits(prompt + answer)[len(prompt) - 1 : -1].topk(2)
        gaps = (best.values[:, 0] - best.values[:, 1]).tolist()
        clear = next((i for i, gap in enumerate(gaps) if gap < 1e-3), len(gaps))
        return best.indices[:clear, 0].tolist()
