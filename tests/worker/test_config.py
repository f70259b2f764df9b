"""Options of `python -m worker` from flags and environment."""

from __future__ import annotations

import subprocess
import sys

import pytest

from contracts.options import WorkerOptions
from worker.config import ENV_PREFIX, ConfigError, WorkerConfig, read_config


def read(*flags: str) -> WorkerConfig:
    return read_config(["--model", "m", *flags])


def test_defaults() -> None:
    config = read()
    assert config.model_names == ("m",)
    assert (config.host, config.port, config.uds) == ("127.0.0.1", 8001, None)
    assert config.shutdown_timeout == 15 * 60
    for name, field in WorkerOptions.model_fields.items():
        assert getattr(config, name) == field.default, name


def test_flags_with_dashes_or_underscores_and_either_way_to_give_a_value() -> None:
    config = read("--max_num_seqs", "3", "--max-model-len=64", "--gpu-memory", "2GiB", "--block-size", "32")
    assert (config.max_num_seqs, config.max_model_len) == (3, 64)
    assert (config.gpu_memory, config.block_size) == (2 << 30, 32)
    assert read("--shutdown-timeout", "1m30s").shutdown_timeout == 90


def test_switches_have_both_ways() -> None:
    assert not read("--no-enable-prefix-caching").enable_prefix_caching
    assert read("--enforce-eager").enforce_eager
    assert (
        read("--no-enable_chunked_prefill", "--max-num-batched-tokens", "64").enable_chunked_prefill is False
    )


@pytest.mark.parametrize("words", [["0", "1"], ["0,1"], ["0,", "1"]])
def test_lists(words: list[str]) -> None:
    if "0," in words:
        with pytest.raises(ConfigError, match="gpus"):
            read("--gpus", *words)
    else:
        assert read("--gpus", *words).gpus == (0, 1)
    assert read("--served-model-name", "a", "b/c").model_names == ("a", "b/c")


def test_environment_under_the_command_line() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ENV_PREFIX + "SEED", "5")
        patch.setenv(ENV_PREFIX + "GPUS", "0,1")
        patch.setenv(ENV_PREFIX + "BLOCK_SIZE", "32")
        patch.setenv(ENV_PREFIX + "ENABLE_PREFIX_CACHING", "false")
        config = read_config(["--model", "m"])
        assert (config.seed, config.gpus, config.block_size) == (5, (0, 1), 32)
        assert not config.enable_prefix_caching
        assert read_config(["--model", "m", "--seed", "6"]).seed == 6
        # A copy, and an object made in code, know nothing of the environment.
        assert WorkerConfig(model="m").seed == 0
        assert WorkerConfig(**(config.model_dump() | {"seed": 0})).seed == 0


def test_every_mistake_is_reported_at_once() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ENV_PREFIX + "SEED", "x")
        patch.setenv(ENV_PREFIX + "TYPO", "1")
        with pytest.raises(ConfigError) as error:
            read_config(
                [
                    "--max-num-seqs",
                    "0",
                    "--block-size",
                    "7",
                    "--gpu-memory",
                    "much",
                    "--bogus",
                    "--port",
                    "99999",
                ]
            )
    named = [problem.split(":")[0] for problem in error.value.problems]
    assert sorted(named) == [
        *("--block-size", "--bogus", "--gpu-memory", "--max-num-seqs", "--model", "--port"),
        *(ENV_PREFIX + "SEED", ENV_PREFIX + "TYPO"),
    ]
    for told in (
        "--block-size: must be 8, 16, 32, 64 or 128, not 7",
        "--gpu-memory: 'much' is no size; write a number with B, kB, MB, GB, KiB, MiB or GiB",
        "--max-num-seqs: must be at least 1, not '0'",
        "--port: must be at most 65535, not '99999'",
        "--model: is required; `pagefleet worker MODEL`",
        f"{ENV_PREFIX}SEED: must be a whole number, not 'x'",
    ):
        assert told in error.value.problems


def test_options_that_contradict_each_other() -> None:
    with pytest.raises(ConfigError, match="must be at least max_model_len"):
        read("--no-enable-chunked-prefill", "--max-num-batched-tokens", "8", "--max-model-len", "16")


@pytest.mark.parametrize(
    ("flag", "neutral", "other"),
    [
        ("--tensor-parallel-size", "1", "2"),
        ("--pipeline-parallel-size", "1", "2"),
        ("--quantization", "none", "awq"),
        ("--cpu-offload-gb", "0", "4"),
    ],
)
def test_flags_of_other_servers_are_taken_when_they_do_nothing(flag: str, neutral: str, other: str) -> None:
    assert read(flag, neutral) == read()
    with pytest.raises(ConfigError, match=f"{flag}: only {neutral} is accepted.*not supported yet"):
        read(flag, other)


@pytest.mark.parametrize("kind", ["fp8", "fp8_e4m3"])
def test_a_cache_of_8_bits(kind: str) -> None:
    assert read("--kv-cache-dtype", kind).kv_cache_dtype == kind


@pytest.mark.parametrize("kind", ["fp8_e5m2", "int8"])
def test_other_caches_of_8_bits_are_told_what_there_is(kind: str) -> None:
    with pytest.raises(ConfigError, match=rf"--kv-cache-dtype: {kind} isn't offered: fp8 \(fp8_e4m3\)"):
        read("--kv-cache-dtype", kind)
    with pytest.raises(ConfigError, match=r"--kv-cache-dtype: must be 'auto'.*'fp8'.*, not 'fp9'"):
        read("--kv-cache-dtype", "fp9")


def test_code_that_comes_with_a_model_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="trust-remote-code: refused; code that comes with a model is never run"
    ):
        read("--trust-remote-code")


def test_help_lists_every_option_with_its_meaning() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "worker", "--help"], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    words = " ".join(shown.split())
    for name, field in WorkerConfig.model_fields.items():
        assert f"--{name.replace('_', '-')}" in shown
        assert field.description
        assert field.description in words.replace("- ", "-") or field.description in words
