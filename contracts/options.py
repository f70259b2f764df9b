"""The worker's options: one model for the fleet file's `worker:` block and the worker's command line.

Field names are vLLM's with underscores, so `max_num_seqs` is `--max-num-seqs` on the command line. The
gateway validates the block with this model before it starts anything; the worker parses its flags with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from contracts.units import ByteSize, Count

KvDtype = Literal["auto", "float32", "float16", "bfloat16", "fp8", "fp8_e4m3"]


class WorkerOptions(BaseModel):
    """Options that a person may set for one worker; defaults suit a small machine and are resolved at
    start."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    revision: Annotated[str, Field(min_length=1)] | None = Field(
        None, description="Branch, tag or commit of a model from the hub; default: its main branch."
    )
    tokenizer: str | None = Field(
        None, description="Directory or file of the tokenizer, if not the model's own."
    )
    chat_template: str | None = Field(
        None, description="Path of a Jinja chat template, if not the model's own."
    )
    tool_call_parser: Literal[
        "auto",
        "none",
        "hermes",
        "qwen3_coder",
        "llama3_json",
        "llama4_pythonic",
        "pythonic",
        "phi4_mini_json",
        "mistral",
    ] = Field("auto", description="How the model writes tool calls; auto: as its chat template shows.")
    reasoning_parser: Literal["auto", "none", "qwen3", "deepseek_r1"] = Field(
        "auto", description="How the model writes its reasoning; auto: as its chat template shows."
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="auto: cuda if there is one, else cpu."
    )
    gpus: tuple[int, ...] = Field(
        (), description="Indices of the GPUs this worker may use; empty: the first."
    )
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = Field(
        "auto", description="Weights and activations; auto: the checkpoint's on a GPU, float32 on a CPU."
    )
    kv_cache_dtype: KvDtype = Field(
        "auto",
        description="Elements of the KV cache; auto: same as dtype; fp8, the same as fp8_e4m3: half as large "
        "as 16 bits.",
    )
    max_model_len: Annotated[Count, Field(ge=1)] | None = Field(
        None, description="Longest prompt + answer in tokens; default: what the model was made for."
    )
    max_num_seqs: Annotated[int, Field(ge=1, le=4096)] | None = Field(
        None,
        description="Most sequences in one step; default: 1024 on a GPU, 64 on a CPU, or the token budget.",
    )
    max_num_batched_tokens: Annotated[Count, Field(ge=1, le=1 << 20)] | None = Field(
        None, description="Token budget of one step; default: 8192 on a GPU, 512 on a CPU."
    )
    block_size: Literal[8, 16, 32, 64, 128] = Field(16, description="Tokens a KV page holds.")
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = Field(
        0.9, description="Share of the card's memory for weights, activations and KV pages together."
    )
    gpu_memory: ByteSize | None = Field(
        None, description="The same as bytes, e.g. 20GiB; wins over the share."
    )
    kv_cache_memory_bytes: ByteSize | None = Field(
        None,
        description="Bytes for KV pages alone; default on a CPU: 1 GiB, on a GPU: what the budget leaves.",
    )
    num_gpu_blocks_override: Annotated[int, Field(ge=2)] | None = Field(
        None, description="Exact number of KV pages, for tests; wins over everything."
    )
    enable_prefix_caching: bool = Field(True, description="Share pages between equal prompt prefixes.")
    enable_chunked_prefill: bool = Field(
        True, description="Split long prompts over steps; off: a prompt is prefilled in one step."
    )
    tpot_target_ms: Annotated[float, Field(ge=0, le=60_000)] | None = Field(
        None,
        description="Milliseconds that a step should take while answers grow, which bounds the prompt "
        "tokens in it; 0: no bound; default: CPU in proportion to steps without prompts, GPU no bound.",
    )
    enforce_eager: bool = Field(False, description="Run without CUDA graphs.")
    rope_theta: Annotated[float, Field(gt=0)] | None = Field(
        None, description="Overrides the checkpoint's value."
    )
    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(0, description="Seed of random: weights.")
    threads: Annotated[int, Field(ge=1, le=1024)] | None = Field(
        None,
        description="CPU threads of the engine; default: all cores, shared out in a fleet.",
    )
    max_waiting: Annotated[int, Field(ge=1)] = Field(
        1024, description="Requests that may wait; beyond it 503 with Retry-After."
    )
    runner: Literal["auto", "generate", "pooling"] = Field(
        "auto",
        description="generate: answers; pooling: embeddings; auto: pooling for a checkpoint that says how it "
        "pools, else generate.",
    )
    pooling_type: Literal["auto", "last", "mean"] = Field(
        "auto",
        description="What an embedding is made of: the last token's state or all tokens' mean; auto: as the "
        "checkpoint says, else last.",
    )
    disable_log_stats: bool = Field(False, description="No periodic statistics line in the log.")

    @field_validator("dtype", mode="before")
    @classmethod
    def _dtype_in_short(cls, value: Any) -> Any:
        """As torch and vLLM have it."""
        return {"half": "float16", "float": "float32"}.get(value, value) if isinstance(value, str) else value

    @field_validator("kv_cache_dtype", mode="before")
    @classmethod
    def _other_bytes(cls, value: Any) -> Any:
        """What vLLM has besides."""
        if value in ("fp8_e5m2", "fp8_inc", "int8"):
            raise ValueError(f"{value} isn't offered: fp8 (fp8_e4m3) takes the same memory")
        return value

    @field_validator("*", mode="before")
    @classmethod
    def _no_switch(cls, value: Any, info: ValidationInfo) -> Any:
        """`true` would count as 1."""
        values = value if isinstance(value, (list, tuple)) else (value,)
        annotation = cls.model_fields[info.field_name or ""].annotation
        if any(isinstance(one, bool) for one in values) and bool not in (annotation, *get_args(annotation)):
            raise ValueError("is no switch: neither true nor false can be its value")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> WorkerOptions:
        problems = list(self._contradictions())
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def _contradictions(self) -> Iterator[str]:
        """What can't be together on any machine and with any model; the engine checks the rest."""
        tokens = self.max_num_batched_tokens
        if self.tpot_target_ms and not self.enable_chunked_prefill:
            yield "tpot_target_ms splits prompts over steps: it needs enable_chunked_prefill"
        if self.device == "cpu" and self.dtype not in ("auto", "float32"):
            yield f"dtype {self.dtype} needs a GPU; on a CPU only float32 is fast and exact"
        if tokens is None:
            return
        if self.max_num_seqs is not None and self.enable_chunked_prefill and tokens < self.max_num_seqs:
            yield (
                f"max_num_batched_tokens ({tokens}) must be at least max_num_seqs ({self.max_num_seqs}): "
                "a step must have room for a token of every sequence"
            )
        if self.max_model_len is not None and not self.enable_chunked_prefill and tokens < self.max_model_len:
            yield (
                f"max_num_batched_tokens ({tokens}) must be at least max_model_len "
                f"({self.max_model_len}) when enable_chunked_prefill is off"
            )
