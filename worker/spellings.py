"""Flags of vLLM's start-up scripts (`vllm serve`, 0.4 to 0.26) that a worker hasn't under that name: which
are taken as they are, and what the others are told. docs/migrating-from-vllm.md is held to these tables.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from typing import Any, Final

from pydantic import ValidationError

from contracts.options import WorkerOptions
from contracts.plain import describe_value
from contracts.suggest import did_you_mean

# One value says what is so anyway, others can't be had.
ONLY: Final[Mapping[str, str]] = {
    "tensor-parallel-size": "1",
    "pipeline-parallel-size": "1",
    "data-parallel-size": "1",
    "quantization": "none",
    "cpu-offload-gb": "0",
    "load-format": "auto",
    "generation-config": "vllm",
    "max-logprobs": "20",
    "chat-template-content-format": "auto",
    "tokenizer-mode": "auto",
    "config-format": "auto",
    "model-impl": "auto",
    "task": "generate",
    "convert": "auto",
    "preemption-mode": "recompute",
    "scheduling-policy": "priority",
    "guided-decoding-backend": "auto",
    "structured-outputs-backend": "auto",
    "response-role": "assistant",
    "distributed-executor-backend": "mp",
    "max-parallel-loading-workers": "1",
    "num-scheduler-steps": "1",
    "api-server-count": "1",
    "logprobs-mode": "raw_logprobs",
    "prefix-caching-hash-algo": "sha256",
    "nnodes": "1",
}
# What is told to those who want another value than that.
ELSE: Final[Mapping[str, str]] = {
    "task": "embeddings are --runner pooling",
    "convert": "embeddings are --runner pooling",
    "load-format": "GGUF and safetensors are told by the files; leave it out",
    "quantization": "GGUF files say how they are quantised; leave it out for them. AWQ, GPTQ and FP8 are "
    "not supported yet",
    "generation-config": "requests say how they are sampled",
    "max-logprobs": "at most 20 alternatives are told",
    "chat-template-content-format": "it is read from the template",
    "api-server-count": "a worker has one; the processes of a gateway are gateway.processes",
    "logprobs-mode": "log-probabilities are the model's own, before temperature and penalties",
}
SHORT: Final[Mapping[str, str]] = {
    "tensor-parallel-size": "-tp",
    "pipeline-parallel-size": "-pp",
    "data-parallel-size": "-dp",
    "quantization": "-q",
    "compilation-config": "-cc",
    "optimization-level": "-O",
}

# Taken and without effect, for a reason.
NO_EFFECT: Final[Mapping[str, str]] = {
    "enable-reasoning": "--reasoning-parser says it",
    "enable-auto-tool-choice": "models call tools by themselves",
    "disable-log-requests": "requests are never logged",
    "no-enable-log-requests": "requests are never logged",
    "disable-uvicorn-access-log": "requests are never logged",
    "use-v2-block-manager": "there is one",
    "disable-frontend-multiprocessing": "the engine is always a process of its own",
    "disable-custom-all-reduce": "a worker uses one GPU",
    "enable-prompt-tokens-details": "usage always has cached_tokens",
    "async-scheduling": "steps overlap on a GPU by themselves",
    "no-trust-remote-code": "code that comes with a model is never run",
    "enable-server-load-tracking": "GET /health has inflight",
    "disable-fastapi-docs": "only /openapi.json is served",
    "disable-cascade-attn": "there is none",
    "enable-request-id-headers": "answers always have x-request-id",
    "exclude-tools-when-tool-choice-none": "a model isn't shown tools that it may not call",
    "disable-hybrid-kv-cache-manager": "there is none",
    "disable-async-output-proc": "texts are made in another process anyway",
    "use-tqdm-on-load": "a terminal shows how far a model is loaded",
    "no-use-tqdm-on-load": "logs have a line for each step",
    "no-enable-log-outputs": "answers are never logged",
    "log-error-stack": "failures are logged with their stack",
    "guided-decoding-disable-fallback": "there is one backend",
    "language-model-only": "the models read text only",
    "disable-chunked-mm-input": "the models read text only",
    "skip-mm-profiling": "the models read text only",
}
NO_EFFECT_WITH_VALUE: Final[Mapping[str, str]] = {
    "swap-space": "preempted requests are computed again, nothing is swapped",
    "max-log-len": "prompts are never logged",
    "max-seq-len-to-capture": "CUDA graphs serve sequences of any length",
    "cuda-graph-sizes": "sizes of CUDA graphs follow max_num_seqs",
    "compilation-config": "kernels are compiled and graphs captured at every start",
    "uvicorn-log-level": "uvicorn doesn't log by itself",
    "cudagraph-capture-sizes": "sizes of CUDA graphs follow max_num_seqs",
    "max-cudagraph-capture-size": "sizes of CUDA graphs follow max_num_seqs",
    "optimization-level": "kernels are compiled and graphs captured at every start",
    "attention-backend": "there is one",
    "stream-interval": "tokens that are ready together come as one chunk",
    "safetensors-load-strategy": "files are read in the order in which they lie",
    "disable-access-log-for-endpoints": "requests are never logged",
    "h11-max-incomplete-event-size": "heads have at most 64 KiB",
    "mm-processor-cache-gb": "the models read text only",
    "show-hidden-metrics-for-version": "there are none",
}

# What is told to those who use them.
REFUSED: Final[Mapping[str, str]] = {
    "trust-remote-code": "refused; code that comes with a model is never run here. "
    "Models of the supported architectures don't need it",
    "max-seq-len": "is now --max-model-len",
    "context-length": "is now --max-model-len",
    "mem-fraction-static": "is now --gpu-memory-utilization",
    "enable-log-requests": "has no counterpart: requests are never logged, the gateway's audit file has them "
    "(gateway.audit.file)",
    "awq-ckpt-path": "is now --model: the directory or hub id of the checkpoint. AWQ isn't supported yet",
    "awq-wbits": "is read from the checkpoint now. AWQ isn't supported yet",
    "awq-groupsize": "is read from the checkpoint now. AWQ isn't supported yet",
    "model-path": "is now --model",
    "tokenizer-path": "is now --tokenizer",
    "tokenizer-revision": "isn't needed: the tokenizer comes with the model, of the same --revision",
    "code-revision": "isn't needed: code that comes with a model is never run here",
    "download-dir": "is the environment variable HF_HOME, or HF_HUB_CACHE",
    "hf-token": "is the environment variable HF_TOKEN",
    "hf-overrides": "isn't offered: only --rope-theta and --max-model-len change what a checkpoint says",
    "rope-scaling": "isn't offered: it is read from the checkpoint's config.json",
    "sliding-window": "isn't offered: it is read from the checkpoint's config.json",
    "disable-sliding-window": "isn't offered: sliding windows are computed as the model was trained",
    "api-key": "is the gateway's: gateway.auth.mode keys, and `pagefleet keys create`",
    "ssl-keyfile": "isn't offered: nginx in front does TLS (`pagefleet nginx render`)",
    "ssl-certfile": "isn't offered: nginx in front does TLS (`pagefleet nginx render`)",
    "ssl-ca-certs": "isn't offered: nginx in front does TLS (`pagefleet nginx render`)",
    "root-path": "isn't offered: nginx in front maps paths (`pagefleet nginx render`)",
    "allowed-origins": "isn't offered: nginx in front sends CORS headers",
    "middleware": "isn't offered: no code of others runs in a worker",
    "enable-lora": "isn't offered yet: serve the merged checkpoint",
    "lora-modules": "isn't offered yet: serve the merged checkpoint",
    "max-loras": "isn't offered yet: serve the merged checkpoint",
    "max-lora-rank": "isn't offered yet: serve the merged checkpoint",
    "speculative-config": "isn't offered yet",
    "speculative-model": "isn't offered yet",
    "num-speculative-tokens": "isn't offered yet",
    "limit-mm-per-prompt": "isn't offered: the models read text only",
    "mm-processor-kwargs": "isn't offered: the models read text only",
    "enable-expert-parallel": "isn't offered: mixtures of experts aren't supported",
    "kv-transfer-config": "isn't offered",
    "calculate-kv-scales": "isn't offered: an FP8 KV cache has a scale of 1",
    "long-prefill-token-threshold": "is --tpot-target-ms: in time instead of tokens",
    "max-num-partial-prefills": "isn't needed: prompts take turns (--tpot-target-ms)",
    "max-long-partial-prefills": "isn't needed: prompts take turns (--tpot-target-ms)",
    "override-generation-config": "isn't offered: requests say how they are sampled",
    "enable-sleep-mode": "isn't offered: `pagefleet swap start` replaces a model while it is used",
    "logits-processors": "isn't offered: no code of others runs in a worker",
    "worker-cls": "isn't offered: no code of others runs in a worker",
    "worker-extension-cls": "isn't offered: no code of others runs in a worker",
    "scheduler-cls": "isn't offered: no code of others runs in a worker",
    "tool-parser-plugin": "isn't offered: no code of others runs in a worker",
    "reasoning-parser-plugin": "isn't offered: no code of others runs in a worker",
    "allowed-methods": "isn't offered: nginx in front sends CORS headers",
    "allowed-headers": "isn't offered: nginx in front sends CORS headers",
    "allow-credentials": "isn't offered: nginx in front sends CORS headers",
    "pooler-config": "isn't offered: it is read from the checkpoint's modules.json",
    "override-pooler-config": "isn't offered: it is read from the checkpoint's modules.json",
    "skip-tokenizer-init": "isn't needed: token ids are taken and told with a tokenizer too",
    "kv-events-config": "isn't offered",
    "enable-force-include-usage": "isn't offered: a request asks for it by stream_options.include_usage",
    "return-tokens-as-token-ids": "isn't offered: a request asks for it by return_tokens_as_token_ids",
    "config": "isn't offered: a fleet file has the options of all models (`pagefleet up FILE`)",
    "default-chat-template-kwargs": "isn't offered: requests give chat_template_kwargs, or "
    "--chat-template has them set",
    "trust-request-chat-template": "isn't offered: --chat-template sets it for all requests",
    "enable-prompt-embeds": "isn't offered: prompts are texts or token ids",
    "enable-log-outputs": "has no counterpart: answers are never logged",
    "log-config-file": "isn't offered: the log goes to stderr, a line for each event",
    "structured-outputs-config": "isn't offered: there is one backend, and requests say the rest",
    "kv-offloading-size": "isn't offered yet",
    "model-loader-extra-config": "isn't needed: GGUF and safetensors are told by the files",
    "ignore-patterns": "isn't needed: only the files that are used are fetched",
    "headless": "isn't offered: a model runs on one machine",
    "node-rank": "isn't offered: a model runs on one machine",
    "master-addr": "isn't offered: a model runs on one machine",
    "data-parallel-address": "isn't offered: replicas of a fleet file are workers of their own",
    "tool-server": "isn't offered: the server runs no tools",
    "enable-tokenizer-info-endpoint": "isn't offered: /tokenize and /detokenize tell what a tokenizer does",
    "ssl-cert-reqs": "isn't offered: nginx in front does TLS (`pagefleet nginx render`)",
    "ssl-ciphers": "isn't offered: nginx in front does TLS (`pagefleet nginx render`)",
    "collect-detailed-traces": "isn't offered: --otlp-traces-endpoint has the spans there are",
    "allowed-local-media-path": "isn't offered: the models read text only",
    "profiler-config": "isn't offered: torch.profiler works around LLM.generate, in the same process",
}
# Those of them that take no value.
SWITCHES: Final = frozenset((
    "trust-remote-code", "enable-log-requests", "disable-sliding-window", "enable-lora",
    "enable-expert-parallel", "calculate-kv-scales", "enable-sleep-mode", "allow-credentials",
    "skip-tokenizer-init", "enable-force-include-usage", "return-tokens-as-token-ids",
    "enable-prompt-embeds", "enable-log-outputs", "headless", "trust-request-chat-template",
    "enable-tokenizer-info-endpoint",
))  # fmt: skip


def add_flags(parser: argparse.ArgumentParser) -> None:
    """All of them, without showing the refused ones in --help."""
    group = parser.add_argument_group("accepted for compatibility")
    for flag, only in ONLY.items():
        group.add_argument(*_names(flag), metavar=only.upper(), help=f"Only {only}.")
    for flag, why in NO_EFFECT.items():
        group.add_argument(f"--{flag}", action="store_true", help=f"No effect: {why}.")
    for flag, why in NO_EFFECT_WITH_VALUE.items():
        group.add_argument(*_names(flag), nargs="+", metavar="X", help=f"No effect: {why}.")
    for flag in REFUSED:
        if flag in SWITCHES:
            parser.add_argument(f"--{flag}", action="store_const", const=True, help=argparse.SUPPRESS)
        else:
            parser.add_argument(f"--{flag}", nargs="*", help=argparse.SUPPRESS)


def _names(flag: str) -> list[str]:
    return [f"--{flag}", *([SHORT[flag]] if flag in SHORT else [])]


def taken() -> Iterator[str]:
    """The flags among them that a worker starts with."""
    for flags in (ONLY, NO_EFFECT, NO_EFFECT_WITH_VALUE):
        yield from (f"--{flag}" for flag in flags)


def problems(given: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with the flags that were `given` (argparse's names), one line each."""
    for flag, only in ONLY.items():
        value = given.get(_name(flag))
        if value is not None and str(value).lower() != only:
            yield f"--{flag}: only {only} is accepted: {ELSE.get(flag, 'anything else is not supported yet')}"
    for flag, why in REFUSED.items():
        if given.get(_name(flag)) not in (None, False):
            yield f"--{flag}: {why}"


def options_of(given: Mapping[str, Any]) -> WorkerOptions:
    """The worker's own of the options that somebody gave in Python, without those that are accepted for
    compatibility. ValueError for everything that is wrong with them, in the command line's words."""
    wrong = list(problems(given))
    known = {*ONLY, *NO_EFFECT, *NO_EFFECT_WITH_VALUE, *REFUSED}
    try:
        options = WorkerOptions.model_validate(
            {name: value for name, value in given.items() if name.replace("_", "-") not in known}
        )
    except ValidationError as error:
        wrong += [_problem(dict(detail)) for detail in error.errors()]
    else:
        if not wrong:
            return options
    raise ValueError("; ".join(wrong)) from None


def _problem(detail: dict[str, Any]) -> str:
    if not detail["loc"]:
        return describe_value(detail)
    name = str(detail["loc"][0])
    if detail["type"] == "extra_forbidden":
        return f"{name}: no such option{did_you_mean(name, WorkerOptions.model_fields)}"
    return f"{name}: {describe_value(detail)}"


def _name(flag: str) -> str:
    return flag.replace("-", "_")
