"""What is wrong with a fleet file: said all at once, each with its place and a way out."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gateway.fleet_files import GOOD, problems, write

pytestmark = pytest.mark.usefixtures("clean_environment")

A = "models:\n  - name: a\n    source: o/n\n"
CASES = {
    "half precision on a CPU": (
        A + "    worker: {device: cpu, dtype: float16}\n",
        ":4: models[0].worker: dtype float16 needs a GPU; on a CPU only float32",
    ),
    "half precision on a CPU as default": (
        "defaults: {device: cpu, dtype: float16}\n" + A + "  - {name: b, source: o/n}\n",
        ":1: defaults: dtype float16 needs a GPU; on a CPU only float32",
    ),
    "a step smaller than its sequences": (
        A + "    worker: {max_num_seqs: 8, max_num_batched_tokens: 4}\n",
        ":4: models[0].worker: max_num_batched_tokens (4) must be at least max_num_seqs (8): a step",
    ),
    "words for a whole number": (
        A + "    worker: {max_num_seqs: many}\n",
        ":4: models[0].worker.max_num_seqs: must be a whole number, not 'many'",
    ),
    "unknown key": (A + "    replica: 2\n", ":4: models[0].replica: unknown key; did you mean 'replicas'?"),
    "unknown top-level key": ("model: []\n" + GOOD, ":1: model: unknown key; did you mean 'models'?"),
    "unknown key without likeness": (
        "supervisor: {zzz: 1}\n" + GOOD,
        ":1: supervisor.zzz: unknown key; known here: backend, drain_timeout, stall_timeout, "
        "start_timeout, state_dir",
    ),
    "unknown worker option": (
        A + "    worker:\n      gpu_memroy: 1GiB\n",
        ":5: models[0].worker.gpu_memroy: unknown key; did you mean 'gpu_memory'?",
    ),
    "no models": ("gateway: {}\n", ":1: models: this key is needed"),
    "empty list of models": ("gateway: {}\nmodels: []\n", ":2: models: at least one model is needed"),
    "missing source": ("models:\n  - name: a\n", ":2: models[0].source: this key is needed"),
    "bad size": (
        A + "    worker: {gpu_memory: 20Gib/s}\n",
        ":4: models[0].worker.gpu_memory: '20Gib/s' is no size; write a number with",
    ),
    "bad duration": (
        "gateway:\n  timeouts:\n    connect: 2 parsecs\n" + GOOD,
        ":3: gateway.timeouts.connect: '2 parsecs' is no duration; write a number with us, ms, s, m, h or d",
    ),
    "zero timeout": (
        "gateway: {timeouts: {idle: 0s}}\n" + GOOD,
        ":1: gateway.timeouts.idle: a duration must be more than 0 and at most 7d",
    ),
    "port out of range": (
        "gateway:\n  port: 99999\n" + GOOD,
        ":2: gateway.port: must be at most 65535, not 99999",
    ),
    "port that is a truth value": (
        "gateway: {port: yes}\n" + GOOD,
        ":1: gateway.port: a number is needed, not true or false",
    ),
    "duplicate name": (
        "models:\n  - {name: a, source: o/n}\n  - {name: a, source: o/n}\n",
        ":3: models[1].name: 'a' is already the name of models[0]",
    ),
    "alias is another's name": (
        "models:\n  - {name: a, source: o/n, aliases: [b]}\n  - {name: b, source: o/n}\n",
        ":2: models[0].aliases[0]: 'b' is already the name of models[1]",
    ),
    "alias twice": (
        "models:\n  - {name: a, source: o/n, aliases: [c]}\n  - {name: b, source: o/n, aliases: [c]}\n",
        ":3: models[1].aliases[0]: 'c' is already the alias of models[0]",
    ),
    "name that reads as a question about another": (
        "models:\n  - {name: a, source: o/n}\n  - {name: a/history, source: o/n}\n",
        ":3: models[1].name: 'a/history' can't be told from a question about 'a'; name it otherwise",
    ),
    "alias that reads as a command to another": (
        "models:\n  - {name: a/b, source: o/n}\n  - {name: c, source: o/n, aliases: [x/undo, a/b/abort]}\n",
        ":3: models[1].aliases[1]: 'a/b/abort' can't be told from a question about 'a/b'; name it otherwise",
    ),
    "name with a space": (
        "models: [{name: a b, source: o/n}]\n",
        ":1: models[0].name: letters, digits and . _ : / @ + - are allowed, starting with a letter or digit, "
        "not 'a b'",
    ),
    "file that isn't there": (
        "models:\n  - name: a\n    source: /none/m.gguf\n",
        ":3: models[0].source: /none/m.gguf isn't there",
    ),
    "random without its file": (
        "models: [{name: a, source: 'random:/none/c.json'}]\n",
        ":1: models[0].source: /none/c.json isn't there",
    ),
    "duplicate key": (
        "gateway:\n  port: 1\n  port: 2\n" + GOOD,
        ":3: gateway.port: this key is already in line 2; keep one of them",
    ),
    "key that isn't text": (
        "gateway: {on: 1}\n" + GOOD,
        ":1: gateway.on: a key must be text; put it in quotes",
    ),
    "redis": (
        "gateway:\n  redis_url: http://:secret@h/0\n" + GOOD,
        ":2: gateway.redis_url: the Redis URL can't be used; it must look like redis://HOST:PORT/DB, "
        "rediss://… (TLS), unix:///PATH, redis+sentinel://HOST:PORT,HOST:PORT/MASTER/DB or "
        "redis+cluster://HOST:PORT,HOST:PORT",
    ),
    "a burst without a rate": (
        "gateway:\n  limits:\n    default: {burst: 5}\n" + GOOD,
        ":3: gateway.limits.default: burst has a meaning only beside qps; set qps too or leave burst out",
    ),
    "a burst that never comes back": (
        "models: [{name: a, source: org/name, limits: {qps: 0.001, burst: 100000}}]\n",
        ":1: models[0].limits: burst 100000 at qps 0.001 takes over 31 days to come back; raise qps or lower "
        "burst",
    ),
    "tokens": (
        "gateway:\n  limits: {default: {tokens_per_minute: 1e12}}\n" + GOOD,
        ":2: gateway.limits.default.tokens_per_minute: must be a whole number, not '1e12'",
    ),
    "processes that can't count together": (
        "gateway:\n  processes: 3\n  limits: {default: {qps: 5}}\n" + GOOD,
        ":2: gateway.processes: 3 processes can't count limits together without Redis; set "
        "gateway.redis_url or processes: 1, or take the limits out",
    ),
    "auth": (
        "gateway: {auth: {mode: oidc}}\n" + GOOD,
        ":1: gateway.auth: mode oidc needs issuer and audience",
    ),
    "auth that nobody knows": (
        "gateway: {auth: {mode: key}}\n" + GOOD,
        ":1: gateway.auth.mode: must be 'none', 'keys' or 'oidc', not 'key'",
    ),
    "trusted proxy": (
        "gateway:\n  auth:\n    trusted_proxies:\n      - 10.0.0.0/8\n      - 10.0.0.1/8\n" + GOOD,
        ":5: gateway.auth.trusted_proxies[1]: '10.0.0.1/8' is no trusted proxy: 10.0.0.1/8 has host bits "
        "set; write an address, a network such as 10.0.0.0/8, or unix: for peers on a Unix socket",
    ),
    "trusted proxy by name": (
        "gateway: {auth: {trusted_proxies: [nginx]}}\n" + GOOD,
        ":1: gateway.auth.trusted_proxies[0]: 'nginx' is no trusted proxy: 'nginx' does not appear to be an "
        "IPv4 or IPv6 network; write an address, a network such as 10.0.0.0/8, or unix: for peers on a Unix "
        "socket",
    ),
    "trusted proxies that are no list": (
        "gateway: {auth: {trusted_proxies: 10.0.0.1}}\n" + GOOD,
        ":1: gateway.auth.trusted_proxies: must be a list, not '10.0.0.1'",
    ),
    "unix: without quotes": (
        "gateway: {auth: {trusted_proxies: [unix:]}}\n" + GOOD,
        ":1: gateway.auth.trusted_proxies[0]: must be text; put it in quotes",
    ),
    "forwarded header": (
        "gateway: {auth: {forwarded_header: x-real-ip}}\n" + GOOD,
        ":1: gateway.auth.forwarded_header: must be 'x-forwarded-for' or 'forwarded', not 'x-real-ip'",
    ),
    "processes": (
        "gateway: {processes: 65}\n" + GOOD,
        ":1: gateway.processes: must be at most 64, not 65",
    ),
    "audit": (
        "gateway: {audit: {file: /}}\n" + GOOD,
        ":1: gateway.audit.file: / is a directory; name a file in it",
    ),
    "audit in no directory": (
        "gateway: {audit: {file: /dev/null/audit.jsonl}}\n" + GOOD,
        ":1: gateway.audit.file: /dev/null is no directory",
    ),
    "audit of a tiny size": (
        "gateway: {audit: {file: a.jsonl, max_size: 1KiB}}\n" + GOOD,
        ":1: gateway.audit.max_size: must be at least 65536",
    ),
    "audit that keeps nothing": (
        "gateway: {audit: {file: a.jsonl, keep: 0}}\n" + GOOD,
        ":1: gateway.audit.keep: must be at least 1",
    ),
    "backend": (
        "supervisor: {backend: ray}\n" + GOOD,
        ":1: supervisor.backend: 'ray' is not supported yet; use local or systemd",
    ),
    "bad regular expression": (
        A + "    golden: [{prompt: x, expect: '/(/'}]\n",
        ":4: models[0].golden[0].expect: this is no regular expression: missing ), unterminated subpattern "
        "at position 0",
    ),
    "empty file": ("", ":1: the file is empty"),
    "not a mapping": ("- a\n", ":1: the top level must be a mapping with the key 'models'"),
    "a character that YAML doesn't have": (
        "# a comment\n" + GOOD.replace("org", "o\0rg"),
        ":2: this isn't YAML: the character '\\x00' isn't allowed in it; take it out",
    ),
    "not YAML": (
        "gateway: {port: 1\nmodels: [\n",
        ":2: this isn't YAML: expected ',' or '}', but got ':'",
    ),
    "a tag that runs code": (
        "models: !!python/object/apply:os.system ['true']\n",
        ":1: this isn't YAML: could not determine a constructor for the tag",
    ),
    "a document within itself": ("models: &x [*x]\n", "an anchor in line 1 contains itself"),
    "a mapping in place of a list": ("models: {name: a}\n", ":1: models: must be a list"),
}


@pytest.mark.parametrize("case", CASES)
def test_one_problem(case: str, tmp_path: Path) -> None:
    text, expected = CASES[case]
    (problem,) = problems(write(tmp_path, text))
    assert expected in problem
    assert "secret" not in problem


def test_an_expanding_document_is_refused(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    (problem,) = problems(write(tmp_path, "\n".join(lines)))
    assert "expands to more than" in problem


def test_everything_at_once_in_order_of_lines(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """
gateway:
  prot: 8
  port: 0x1FFFF
  timeouts: {connect: soon}
defaults: {device: tpu}
models:
  - {name: a, source: none.gguf, aliases: [b]}
  - {name: b, source: o/n}
  - {name: b, source: o/n}
""",
    )
    found = problems(path)
    assert [int(line.split(":")[1]) for line in found] == [3, 4, 5, 6, 8, 8, 10]
    assert len([line for line in found if "defaults.device" in line]) == 1
