"""Loading: every format brings the same parameters; a checkpoint that does not fit is told why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.worker.checkpoints import gguf_metadata, hf_tensors, permuted, save_gguf, save_hf, small_config
from tests.worker.gguf_files import write_gguf
from tests.worker.paged import PAGE, PagedRun, one_thread
from worker.model.layers import CausalLM
from worker.weights.loader import load_model
from worker.weights.source import SAFETENSORS_INDEX, SourceError, resolve_source

QUANTISED = list(gguf.quants._type_traits)


def load(source: str | Path, dtype: torch.dtype = torch.float32, **options: Any) -> CausalLM:
    return load_model(
        resolve_source(str(source)), dtype=dtype, device="cpu", **{"max_model_len": 64, **options}
    )


def assert_same(found: CausalLM, expected: CausalLM) -> None:
    assert found.named_parameters.keys() == expected.named_parameters.keys()
    for name, tensor in found.named_parameters.items():
        assert torch.equal(tensor, expected.named_parameters[name]), name


@pytest.mark.parametrize(
    ("arch", "changes"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "tie_word_embeddings": True}),
        ("qwen2", {}),
        ("phi3", {}),
    ],
)
def test_gguf_equals_safetensors(arch: str, changes: dict[str, Any], tmp_path: Path) -> None:
    config = small_config(arch, **changes)
    tensors = hf_tensors(config)
    from_hf = load(save_hf(tmp_path / "hf", config, tensors))
    from_gguf = load(save_gguf(tmp_path / "m.gguf", arch, config, tensors))
    assert_same(from_gguf, from_hf)
    torch.testing.assert_close(from_gguf.cos_sin, from_hf.cos_sin, rtol=0, atol=1e-6)


def test_fused_rows_are_in_order(tmp_path: Path) -> None:
    config = small_config("qwen2")
    tensors = hf_tensors(config)
    named = load(save_hf(tmp_path / "hf", config, tensors)).named_parameters
    layer = "model.layers.1."
    for ours, theirs in {
        "qkv.weight": [f"self_attn.{x}_proj.weight" for x in "qkv"],
        "qkv.bias": [f"self_attn.{x}_proj.bias" for x in "qkv"],
        "gate_up.weight": ["mlp.gate_proj.weight", "mlp.up_proj.weight"],
        "output.weight": ["self_attn.o_proj.weight"],
        "input_norm.weight": ["input_layernorm.weight"],
    }.items():
        assert torch.equal(
            named[f"layers.1.{ours}"], torch.cat([tensors[layer + name] for name in theirs])
        ), ours


def blocks(kind: gguf.GGMLQuantizationType, shape: tuple[int, int], seed: int) -> np.ndarray:
    """Raw blocks [rows, bytes]: quantised numbers where the library can quantise, else any bytes."""
    random = np.random.default_rng(seed)
    try:
        return gguf.quants.quantize(random.standard_normal(shape, dtype=np.float32), kind)
    except NotImplementedError:
        block, size = gguf.GGML_QUANT_SIZES[kind]
        return random.integers(0, 256, (shape[0], shape[1] // block * size), dtype=np.uint8)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # any bytes include scales beyond float16's range
@pytest.mark.parametrize("kind", QUANTISED, ids=lambda kind: kind.name)
def test_quantised_types(kind: gguf.GGMLQuantizationType, tmp_path: Path) -> None:
    config = small_config("llama", num_hidden_layers=1)
    shapes = {
        "token_embd": (1100, 256),
        "blk.0.attn_q": (256, 256),
        "blk.0.attn_k": (128, 256),
        "blk.0.attn_v": (128, 256),
        "blk.0.attn_output": (256, 256),
        "blk.0.ffn_gate": (512, 256),
        "blk.0.ffn_up": (512, 256),
        "blk.0.ffn_down": (256, 512),
    }
    raw = {f"{name}.weight": blocks(kind, shape, seed) for seed, (name, shape) in enumerate(shapes.items())}
    norms = {
        f"{name}.weight": np.ones(256, np.float32)
        for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm")
    }
    tensors = {name: (data, kind) for name, data in raw.items()}
    path = write_gguf(tmp_path / "q.gguf", "llama", gguf_metadata("llama", config), {**norms, **tensors})
    named = load(path).named_parameters
    plain = {name.removesuffix(".weight"): gguf.dequantize(data, kind) for name, data in raw.items()}
    q, k, v = (
        named["layers.0.qkv.weight"].numpy()[:256],
        *np.split(named["layers.0.qkv.weight"].numpy()[256:], 2),
    )
    gate, up = np.split(named["layers.0.gate_up.weight"].numpy(), 2)
    for name, found in {
        "token_embd": named["embedding.weight"].numpy(),
        "blk.0.attn_q": permuted(q, 4),
        "blk.0.attn_k": permuted(k, 2),
        "blk.0.attn_v": v,
        "blk.0.attn_output": named["layers.0.output.weight"].numpy(),
        "blk.0.ffn_gate": gate,
        "blk.0.ffn_up": up,
        "blk.0.ffn_down": named["layers.0.down.weight"].numpy(),
    }.items():
        np.testing.assert_array_equal(found, plain[name], err_msg=name)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_plain_gguf_types(dtype: Any, tmp_path: Path) -> None:
    config = small_config("qwen2")
    tensors = {name: tensor.half().float() for name, tensor in hf_tensors(config).items()}
    expected = load(save_hf(tmp_path / "hf", config, tensors))
    path = save_gguf(
        tmp_path / "m.gguf",
        "qwen2",
        config,
        {n: t.to(getattr(torch, dtype.__name__)) for n, t in tensors.items()},
    )
    assert_same(load(path), expected)


def test_gguf_type_without_dequantisation(tmp_path: Path) -> None:
    raw = np.zeros((1100, 256 // 32 * 40), np.uint8)
    tensors = {"token_embd.weight": (raw, gguf.GGMLQuantizationType.Q8_1)}
    path = write_gguf(tmp_path / "q.gguf", "llama", gguf_metadata("llama", small_config("llama")), tensors)
    with pytest.raises(SourceError, match=r"q\.gguf: tensor token_embd\.weight: type Q8_1"):
        load(path)


def test_dtype_of_the_model_wins(tmp_path: Path) -> None:
    config = small_config("llama", torch_dtype="bfloat16")
    tensors = {name: tensor.bfloat16() for name, tensor in hf_tensors(config).items()}
    path = save_hf(tmp_path / "hf", config, tensors)
    model = load(path)
    assert torch.equal(
        model.named_parameters["embedding.weight"], tensors["model.embed_tokens.weight"].float()
    )
    assert all(p.dtype == torch.float16 for p in load(path, torch.float16).parameters())
    assert model.cos_sin.dtype == load(path, torch.float16).cos_sin.dtype == torch.float32


def changed(config: dict[str, Any], change: str) -> dict[str, Tensor]:
    tensors = hf_tensors(config)
    match change:
        case "missing":
            del tensors["model.layers.1.mlp.up_proj.weight"]
        case "shape":
            tensors["model.norm.weight"] = torch.ones(255)
        case "transposed":
            name = "model.layers.0.mlp.down_proj.weight"
            tensors[name] = tensors[name].t().contiguous()
        case "unexpected":
            tensors["model.layers.2.mlp.up_proj.weight"] = torch.ones(1)
        case "weight scale":
            tensors["model.layers.0.self_attn.k_proj.weight_scale"] = torch.tensor(0.02)
        case "bias":
            tensors["model.layers.0.self_attn.q_proj.bias"] = torch.ones(256)
        case "integers":
            tensors["model.norm.weight"] = torch.ones(256, dtype=torch.int8)
        case "head":
            del tensors["lm_head.weight"]
        case "extras":
            tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(32)
            for name in ("k_scale", "attn.v_scale", "k_proj.k_scale", "v_proj.output_scale", "kv_scale"):
                tensors[f"model.layers.1.self_attn.{name}"] = torch.tensor(0.02)
    return tensors


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("missing", r"1 tensors are missing: model\.layers\.1\.mlp\.up_proj\.weight"),
        ("shape", r"model\.norm\.weight has shape \[255\], expected \[256\]"),
        ("transposed", r"down_proj\.weight has shape \[512, 256\], expected \[256, 512\]"),
        ("unexpected", r"unexpected tensor model\.layers\.2\.mlp\.up_proj\.weight"),
        ("weight scale", r"unexpected tensor model\.layers\.0\.self_attn\.k_proj\.weight_scale"),
        ("bias", r"unexpected tensor model\.layers\.0\.self_attn\.q_proj\.bias"),
        ("integers", r"model\.norm\.weight is I8; supported: F64"),
        ("head", r"missing: lm_head\.weight"),
    ],
)
def test_checkpoint_that_doesnt_fit(change: str, message: str, tmp_path: Path) -> None:
    config = small_config("llama")
    path = save_hf(tmp_path / "hf", config, changed(config, change))
    with pytest.raises(SourceError, match=message) as caught:
        load(path)
    assert str(path) in str(caught.value)


def test_known_extras_are_ignored(tmp_path: Path) -> None:
    config = small_config("llama", tie_word_embeddings=True)
    tensors = {**changed(config, "extras"), "lm_head.weight": torch.zeros(1100, 256)}
    model = load(save_hf(tmp_path / "hf", config, tensors))
    assert "lm_head.weight" not in model.named_parameters
    hidden = torch.randn(2, 256)
    expected = hidden @ tensors["model.embed_tokens.weight"].t()
    torch.testing.assert_close(model.compute_logits(hidden), expected, rtol=1e-4, atol=1e-4)


def test_tensor_in_two_files(tmp_path: Path) -> None:
    config = small_config("llama")
    path = save_hf(tmp_path / "hf", config, hf_tensors(config))
    (path / "model.safetensors").rename(path / "a.safetensors")
    save_file({"model.norm.weight": torch.ones(256)}, path / "b.safetensors")
    with pytest.raises(SourceError, match=r"model\.norm\.weight is there twice"):
        load(path)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({}, "no weight_map"),
        ({"weight_map": {"a": 1}}, "no weight_map"),
        ({"weight_map": {"a": "gone.safetensors"}}, r"names the file gone\.safetensors, which isn't in"),
        ({"weight_map": {"a": "../b.safetensors"}}, r"names the file b\.safetensors, which isn't in"),
    ],
)
def test_broken_index(index: dict[str, Any], message: str, tmp_path: Path) -> None:
    config = small_config("llama")
    save_file({"a": torch.ones(1)}, tmp_path / "b.safetensors")
    path = save_hf(tmp_path / "hf", config, hf_tensors(config))
    (path / SAFETENSORS_INDEX).write_text(json.dumps(index))
    with pytest.raises(SourceError, match=message):
        load(path)


@pytest.mark.parametrize("keep", [0, 7, 100, -1])
def test_truncated_safetensors(keep: int, tmp_path: Path) -> None:
    config = small_config("llama")
    file = save_hf(tmp_path / "hf", config, hf_tensors(config)) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(SourceError, match=r"model\.safetensors: not a readable safetensors file"):
        load(tmp_path / "hf")


def test_random_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(small_config("qwen2", num_hidden_layers=3)))
    calls: list[tuple[int, int]] = []
    model = load(f"random:{tmp_path}", torch.bfloat16, progress=lambda *call: calls.append(call))
    assert_same(load(f"random:{tmp_path}", torch.bfloat16, seed=0), model)
    other = load(f"random:{tmp_path}", torch.bfloat16, seed=1).named_parameters
    for name, parameter in model.named_parameters.items():
        if "norm" in name:
            assert bool((parameter == 1).all())
        else:
            assert parameter.float().std().item() == pytest.approx(0.02, rel=0.15)
            assert not torch.equal(parameter, other[name])
    first, second = (model.named_parameters[f"layers.{i}.down.weight"] for i in (0, 1))
    assert not torch.equal(first, second)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    assert calls[-1] == (model.weight_bytes, model.weight_bytes)


def test_progress_and_rope_theta(tmp_path: Path) -> None:
    config = small_config("llama")
    path = save_hf(tmp_path / "hf", config, hf_tensors(config))
    calls: list[tuple[int, int]] = []
    model = load(path, progress=lambda *call: calls.append(call))
    total = (path / "model.safetensors").stat().st_size
    assert calls[-1] == (total, total)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    overridden = load(path, rope_theta=500000.0, max_model_len=100)
    assert overridden.config.rope.theta == 500000.0
    assert overridden.cos_sin.shape == (100, 64)
    assert not torch.equal(overridden.cos_sin[:64], model.cos_sin)


@pytest.mark.model
def test_demo_model_gives_the_reference_tokens(demo_model: Path, reference_tokens: Path) -> None:
    prompts = json.loads(reference_tokens.read_text())["prompts"]
    run = PagedRun(load(demo_model, max_model_len=1024), num_pages=1024 * 2 // PAGE)
    for prompt in prompts:
        ids, expected = prompt["prompt_ids"], prompt["greedy_ids"]
        with one_thread():
            logits = run.feed({prompt["name"]: ids + expected[:-1]})[prompt["name"]]
        assert len(expected) == 64
        assert logits[len(ids) - 1 :].argmax(-1).tolist() == expected, prompt["name"]
