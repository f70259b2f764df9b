"""What a form costs: throughput of answers that must keep to a JSON schema beside answers that needn't, where
the time of their steps goes, what masks take by threads, and how many of 100 documents are valid.

    python -m bench.grammar_cost --out bench/results/grammar_cost.json
    python -m bench.grammar_cost --device cuda --out bench/results/grammar_cost_h200.json [--tokenizer PATH]

CPU: SmolLM2-135M-Instruct, 2 threads, 16 answers at a time. GPU: the Qwen2-7B shape with random weights, 64
answers at a time after 512 tokens each; without --tokenizer its tokens are SmolLM2's, a third as many as
Qwen's. All at temperature 1, and all answers have the same number of tokens: the form is a list of so many
records that none ends before, and the others ignore the end of sequence. Rounds are interleaved; medians.

Steps: milliseconds of their parts (bench/step_parts.py). Masks: milliseconds for those of all answers, by
threads and by how often the form was compiled (copies of one share a lock); random tokens of those allowed.

Documents (CPU): one record each, at temperature 1 with other seeds; jsonschema says which are valid.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np

from bench import machine
from bench.step_parts import StepParts
from worker import LLM, SamplingParams, StructuredOutputs
from worker.grammar.compiling import compile_matcher
from worker.grammar.constraint import Constraint, MaskWriter, Original

MODELS = Path(__file__).parent / "models"
SMALL = Path(__file__).parent.parent / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
LARGE = f"random:{MODELS / 'qwen2-7b.json'}"
BAR = 0.2  # of the throughput
RECORD: dict[str, Any] = {
    "type": "object",
    "properties": {
        "id": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"},
        "name": {"type": "string", "minLength": 3, "maxLength": 24},
        "status": {"enum": ["open", "in progress", "closed"]},
        "priority": {"type": "integer", "minimum": 1, "maximum": 5},
        "due": {"type": "string", "format": "date"},
        "labels": {
            "type": "array", "items": {"enum": ["bug", "docs", "speed", "ux"]}, "minItems": 1, "maxItems": 3,
        },
        "owner": {"$ref": "#/$defs/person"},
        "reviewers": {"type": "array", "items": {"$ref": "#/$defs/person"}, "maxItems": 2},
        "estimate": {"anyOf": [{"type": "number", "minimum": 0, "maximum": 100}, {"type": "null"}]},
    },
    "required": ["id", "name", "status", "priority", "due", "labels", "owner", "reviewers", "estimate"],
    "additionalProperties": False,
    "$defs": {
        "person": {
            "type": "object",
            "properties": {
                "email": {"type": "string", "pattern": "^[a-z]{2,8}@[a-z]{2,8}[.](com|org)$"},
                "role": {"enum": ["author", "editor", "guest"]},
                "active": {"type": "boolean"},
            },
            "required": ["email", "role", "active"],
            "additionalProperties": False,
        }
    },
}  # fmt: skip
RECORDS = {"type": "array", "items": RECORD, "minItems": 100, "$defs": RECORD["$defs"]}
PROMPT = "Make up a ticket of a software project. Answer with one JSON object."
TOPICS = [
    "a crash",
    "a slow page",
    "a typo",
    "a missing icon",
    "a leak",
    "a wrong total",
    "a flaky test",
    "logs",
]


def chat_prompts(llm: LLM, count: int) -> list[list[int]]:
    """Token ids of so many chats that ask for a ticket."""
    assert llm.tokenizer is not None
    assert llm.tokenizer.chat_template is not None
    chats = [[{"role": "user", "content": f"{PROMPT} It is about {topic}."}] for topic in TOPICS]
    results = llm.chat(chats, SamplingParams(max_tokens=1))
    return [results[i % len(results)].prompt_token_ids for i in range(count)]


def documents(llm: LLM, count: int, batch: int) -> dict[str, Any]:
    """So many records at temperature 1: how many are valid, and how they ended."""
    form = StructuredOutputs(json=RECORD)
    prompts = chat_prompts(llm, count)
    results = []
    for first in range(0, count, batch):
        seeds = range(first, min(count, first + batch))
        params = [SamplingParams(seed=seed, max_tokens=900, structured_outputs=form) for seed in seeds]
        results += llm.generate([prompts[seed] for seed in seeds], params)
    answers = [result.outputs[0] for result in results]
    return {
        "documents": count,
        "valid": sum(_is_valid(answer.text) for answer in answers),
        "finish_reasons": dict(Counter(answer.finish_reason for answer in answers)),
        "different": len({answer.text for answer in answers}),
        "tokens": statistics.median(len(answer.token_ids) for answer in answers),
    }


def _is_valid(text: str) -> bool:
    try:
        jsonschema.validate(json.loads(text), RECORD, format_checker=jsonschema.FormatChecker())
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def throughput(llm: LLM, prompts: list[list[int]], tokens: int, rounds: int) -> dict[str, Any]:
    """Tokens per second of answers with and without a form, so many tokens each."""
    form = StructuredOutputs(json=RECORDS)
    started = time.perf_counter()
    llm.generate(prompts[0], SamplingParams(max_tokens=1, structured_outputs=form))
    first = time.perf_counter() - started
    rates: dict[bool, list[float]] = {False: [], True: []}
    parts = {constrained: StepParts(llm._engine.config.device) for constrained in rates}
    for repeat in range(rounds):
        for constrained in (False, True):
            params = [
                SamplingParams(
                    seed=repeat * len(prompts) + i,
                    max_tokens=tokens,
                    ignore_eos=True,
                    structured_outputs=form if constrained else None,
                )
                for i in range(len(prompts))
            ]
            with parts[constrained].timed():
                started = time.perf_counter()
                results = llm.generate(prompts, params)
                elapsed = time.perf_counter() - started
            assert all(len(result.outputs[0].token_ids) == tokens for result in results)
            rates[constrained].append(len(prompts) * tokens / elapsed)
    free, formed = (statistics.median(rates[constrained]) for constrained in (False, True))
    return {
        "answers": len(prompts),
        "tokens_each": tokens,
        "tokens_per_second": free,
        "tokens_per_second_with_form": formed,
        "cost": 1 - formed / free,
        "bar": BAR,
        "met": 1 - formed / free <= BAR,
        "first_form_seconds": first,
        "rounds": {"without": rates[False], "with": rates[True]},
        "step_ms": {"without": parts[False].report(), "with": parts[True].report()},
    }


def masks(llm: LLM, answers: int, steps: int = 48) -> list[dict[str, float]]:
    """What masks of so many answers to the form take by themselves."""
    table = llm._engine._grammars._workshop.token_table()
    form = StructuredOutputs(json=RECORDS)
    ends = frozenset(table.eos_tokens)
    most = min(llm._engine.config.threads, 16)
    found = []
    for threads, compiled in sorted({(1, 1), (most, 1), *((n, n) for n in (2, 4, 8, 16) if n <= most)}):
        originals = [Original(compile_matcher(table, form)) for _ in range(compiled)]
        constraints = [Constraint(originals[i % compiled], ends, 1 << 60) for i in range(answers)]
        taken = _walk(MaskWriter(table.vocab_size, ends, threads), constraints, steps)
        times = {"median": 1e3 * statistics.median(taken), "mean": 1e3 * statistics.fmean(taken)}
        found.append({"threads": threads, "compiled": compiled, **times, "worst": 1e3 * max(taken)})
    return found


def _walk(writer: MaskWriter, constraints: list[Constraint], steps: int) -> list[float]:
    """Seconds for the masks of each step."""
    rng = np.random.default_rng(0)
    bits = np.empty((len(constraints), writer.words), np.uint32)
    taken = []
    for _ in range(steps):
        started = time.perf_counter()
        writer.write(constraints, bits)
        taken.append(time.perf_counter() - started)
        for constraint, mask in zip(constraints, bits.view(np.uint8)):
            allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
            constraint.take(int(rng.choice(allowed)))
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--tokenizer", default=str(SMALL), help="for the GPU's random weights")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--documents", type=int, default=100, help="0: none; on a CPU only")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    result: dict[str, Any] = {"machine": machine.describe()}
    if arguments.device == "cuda":
        with LLM(LARGE, device="cuda", tokenizer=arguments.tokenizer, max_model_len=2048) as llm:
            prompts = [[(7 * i + 13 * j) % 40_000 + 100 for j in range(512)] for i in range(64)]
            result["throughput"] = throughput(llm, prompts, arguments.tokens, arguments.rounds)
            result["masks_ms"] = masks(llm, len(prompts))
    else:
        with LLM(str(SMALL), device="cpu", threads=arguments.threads, max_model_len=2048) as llm:
            prompts = chat_prompts(llm, 16)
            result["throughput"] = throughput(llm, prompts, arguments.tokens, arguments.rounds)
            result["masks_ms"] = masks(llm, len(prompts))
            if arguments.documents:
                result["documents"] = documents(llm, arguments.documents, 20)
    machine.publish(result, arguments.out)


if __name__ == "__main__":
    main()
