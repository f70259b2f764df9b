"""The documentation against the code: what the code has is documented, and what is documented exists."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, get_args

import click
import msgspec
import pytest
from click.testing import CliRunner
from prometheus_client import CollectorRegistry
from pydantic import BaseModel
from starlette.routing import Route

from contracts.headers import DRAINING, QUEUE_FULL
from contracts.options import WorkerOptions
from contracts.units import parse_bytes
from gateway.__main__ import main as gateway_command
from gateway.admission import open_limits
from gateway.app import Gateway
from gateway.cli import main as pagefleet
from gateway.config import FleetFile, load_fleet
from gateway.fleet.admin import admin_app
from gateway.fleet.applying_routes import applying_routes
from gateway.fleet.driver.routes import rollout_routes
from gateway.fleet.state import Routes, RoutesFile, Target, write_routes
from gateway.identity.authenticator import open_authenticator
from gateway.routes.openai import MODELS
from gateway.settings import GatewaySettings
from tests.conftest import ROOT
from worker.config import WorkerConfig, read_config
from worker.server import schemas
from worker.server.app import create_app
from worker.server.metrics import Metrics
from worker.server.not_offered import EMBEDDINGS_NOT_OFFERED, RESPONSES_NOT_OFFERED, refused_fields
from worker.server.responses_input import ResponsesRequest
from worker.server.state import ServerState

API = ROOT / "docs" / "api.md"
CONFIGURATION = ROOT / "docs" / "configuration.md"
ARCHITECTURE = ROOT / "docs" / "architecture.md"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
CELL = re.compile(r"(?<!\\)\|")

Row = list[str]


def tables(page: Path) -> Iterator[tuple[str, Row, list[Row]]]:
    """(heading above, header cells, rows of cells) of every table."""
    heading, block = "", []
    for line in [*page.read_text().splitlines(), ""]:
        if line.startswith("#"):
            heading = line.lstrip("# ")
        if line.startswith("|"):
            block.append([cell.strip() for cell in CELL.split(line)[1:-1]])
        elif block:
            yield heading, block[0], block[2:]
            block = []


def first_cells(page: Path, column: str, heading: str | None = None) -> list[str]:
    """Code spans in the first column of the tables whose first column is so named."""
    return [
        name
        for above, header, rows in tables(page)
        if header[0] == column and heading in (None, above)
        for row in rows
        for name in spans(row[0])
    ]


def spans(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def assert_same(documented: Iterable[str], code: Iterable[str], what: str) -> None:
    documented, code = list(documented), set(code)
    assert sorted(code - set(documented)) == [], f"{what} of the code that the page lacks"
    assert sorted(set(documented) - code) == [], f"{what} of the page that the code lacks"
    assert len(set(documented)) == len(documented), f"{what} documented twice"


# --- configuration.md


def test_worker_options() -> None:
    assert_same(first_cells(CONFIGURATION, "option"), WorkerConfig.model_fields, "worker options")
    for _, header, rows in tables(CONFIGURATION):
        if header[0] == "option":
            for name, flag, *_ in rows:
                assert flag.strip("`") == "--" + name.strip("`").replace("_", "-")


def test_options_of_the_fleet_file_are_those_of_workers() -> None:
    common, alone = [rows for _, header, rows in tables(CONFIGURATION) if header[0] == "option"]
    assert {row[0].strip("`") for row in common} == set(WorkerOptions.model_fields)
    assert {row[0].strip("`") for row in alone} == set(WorkerConfig.model_fields) - set(
        WorkerOptions.model_fields
    )


def fleet_keys(block: type[BaseModel], path: str = "") -> Iterator[str]:
    """Dotted paths of all keys of a fleet file; worker options count as one."""
    for name, field in block.model_fields.items():
        inner = _block_in(field.annotation)
        if inner is None or inner is WorkerOptions:
            yield path + name
            continue
        is_list = "tuple" in str(field.annotation)
        if is_list and not path:
            yield path + name
        yield from fleet_keys(inner, f"{path}{name}{'[]' if is_list else ''}.")


def _block_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for found in map(_block_in, get_args(annotation)) if found), None)


def test_fleet_keys() -> None:
    assert_same(first_cells(CONFIGURATION, "key"), fleet_keys(FleetFile), "fleet keys")


def test_defaults_of_integers_and_switches() -> None:
    """Numbers in the default column are the code's own."""
    for _, header, rows in tables(CONFIGURATION):
        for row in rows if header[0] == "option" else ():
            default = WorkerConfig.model_fields[row[0].strip("`")].default
            written = row[2].strip("`")
            if isinstance(default, bool):
                assert written == ("on" if default else "off"), row
            elif isinstance(default, int):
                assert parse_bytes(written) == default, row
            elif re.fullmatch(r"\d+(\.\d+)?", written):
                assert float(written) == default, row


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_fleet_files_in_the_text_are_valid(page: Path, tmp_path: Path) -> None:
    for number, text in enumerate(code_blocks(page, "yaml")):
        file = tmp_path / f"{number}.yaml"
        file.write_text(text)
        load_fleet(file, check_sources=False)


# --- api.md: endpoints, fields, errors, metrics


@pytest.fixture
def state() -> ServerState:
    return ServerState(WorkerConfig.model_validate({"model": "m"}))


@pytest.fixture
def gateway(tmp_path: Path) -> Gateway:
    """A gateway with one ready worker that nobody asks."""
    target = Target(slot="m-0", generation=1, address="unix:/nowhere", state="ready")
    routes = Routes(model="m", epoch=1, targets=(target,))
    write_routes(tmp_path / "routes.json", RoutesFile(epoch=1, models={"m": routes}))
    settings = GatewaySettings()
    auth = open_authenticator(settings.auth, tmp_path)
    limits = open_limits(settings, {}, tmp_path)
    return Gateway(settings, {"m": ()}, tmp_path / "routes.json", auth, limits, tmp_path)


def worker_endpoints(state: ServerState) -> Iterator[str]:
    for route in create_app(state).routes:  # type: ignore[attr-defined]
        assert isinstance(route, Route)
        endpoint: Any = route.endpoint
        for method in endpoint._handlers:
            if method != "HEAD":
                yield f"{method} {route.path.replace(':path', '')}"


def gateway_endpoints(gateway: Gateway) -> Iterator[str]:
    yield from (f"POST {path}" for path in gateway._proxied)
    yield from (f"GET {path}" for path in gateway._own)
    yield f"GET {MODELS}/{{model}}"


def test_endpoints(state: ServerState, gateway: Gateway) -> None:
    (rows,) = [rows for _, header, rows in tables(API) if header[:2] == ["method and path", "on"]]
    documented = {row[0].strip("`"): row[1].split(", ") for row in rows}
    for process, endpoints in (("worker", worker_endpoints(state)), ("gateway", gateway_endpoints(gateway))):
        assert_same((p for p, on in documented.items() if process in on), endpoints, f"{process} endpoints")


def test_the_supervisors_socket() -> None:
    nothing: Any = None
    routes = [*rollout_routes(nothing), *applying_routes(nothing)]
    code = {
        f"{method} {route.path.replace(':path', '')}"
        for route in admin_app(nothing, nothing, routes).routes
        if isinstance(route, Route)
        for method in (route.methods or set()) - {"HEAD"}
    }
    assert_same(first_cells(API, "supervisor's path"), code, "paths of the supervisor's socket")


FIELD_TABLES: dict[str, type[msgspec.Struct]] = {
    "Sampling fields": schemas.Sampling,
    "POST /v1/chat/completions": schemas.ChatRequest,
    "POST /v1/responses": ResponsesRequest,
    "POST /v1/completions": schemas.CompletionRequest,
    "POST /generate": schemas.GenerateRequest,
    "POST /v1/embeddings": schemas.EmbeddingRequest,
    "POST /tokenize": schemas.TokenizeRequest,
    "POST /detokenize": schemas.DetokenizeRequest,
    "Worker administration": schemas.AbortRequest,
}


def field_names(request: type[msgspec.Struct]) -> set[str]:
    return {field.name for field in msgspec.structs.fields(request)}


@pytest.mark.parametrize("heading", FIELD_TABLES)
def test_fields_of_bodies(heading: str) -> None:
    request = FIELD_TABLES[heading]
    fields = field_names(request) - set(refused_fields(request))
    if issubclass(request, schemas.Sampling) and request is not schemas.Sampling:
        fields -= field_names(schemas.Sampling)
    assert_same(first_cells(API, "field", heading), fields, f"fields of {heading}")


def test_refused_fields_are_fields() -> None:
    refused = set(first_cells(API, "field", "Refused parameters"))
    known = set().union(*map(field_names, FIELD_TABLES.values()))
    assert set(RESPONSES_NOT_OFFERED) | set(EMBEDDINGS_NOT_OFFERED) <= refused
    assert {name.split("[")[0] for name in refused} <= known


CODE_PLACE = {"ApiError": 99, "bad_request": 2, "not_found": 2, "unavailable": 1, "internal_error": 1}


def error_codes() -> Iterator[str]:
    """Codes that the sources give to errors, as literals; and those that come otherwise."""
    yield from (DRAINING, QUEUE_FULL, "internal_error")
    for package in ("contracts", "gateway", "worker"):
        for file in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if (
                    isinstance(node, ast.Call)
                    and isinstance(node.func, ast.Name)
                    and node.func.id in CODE_PLACE
                ):
                    place = CODE_PLACE[node.func.id]
                    named = [word.value for word in node.keywords if word.arg == "code"]
                    for code in [*node.args[place : place + 1], *named]:
                        if isinstance(code, ast.Constant) and isinstance(code.value, str):
                            yield code.value


def test_error_codes() -> None:
    (rows,) = [rows for _, header, rows in tables(API) if header[:2] == ["status", "code"]]
    assert_same({code for row in rows for code in spans(row[1])}, error_codes(), "error codes")


def metrics_of(registry: CollectorRegistry) -> Iterator[tuple[str, str, frozenset[str]]]:
    for metric in registry.collect():
        if metric.name.startswith("pagefleet_"):
            name = metric.name + ("_total" if metric.type == "counter" else "")
            labels = {label for sample in metric.samples for label in sample.labels} - {"le"}
            yield name, metric.type, frozenset(labels)


def test_metrics(state: ServerState, gateway: Gateway) -> None:
    gateway.metrics.done("m", "m-0.1", 200, 1.0, 0.1)
    gateway.metrics.ended(("m", "m-0.1"), good=False)
    gateway.router.on_waited("m", 1.0)
    gateway.router.on_refused("m", "full")
    code = [*metrics_of(Metrics(state).registry), *metrics_of(gateway.metrics.registry)]
    documented = [
        (row[0].strip("`"), row[1], frozenset(spans(row[2])))
        for _, header, rows in tables(API)
        if header[0] == "metric"
        for row in rows
    ]
    assert_same((name for name, *_ in documented), (name for name, *_ in code), "metrics")
    assert set(documented) == set(code)


# --- architecture.md


def test_paths_of_the_architecture_exist() -> None:
    prose = re.sub(r"^```.*?^```", "", ARCHITECTURE.read_text(), flags=re.M | re.S)
    paths = [span for span in spans(prose) if re.fullmatch(r"[\w./]+/|[\w./]+\.\w+", span) and "/" in span]
    assert len(paths) > 50
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_every_folder_is_in_the_architecture() -> None:
    text = ARCHITECTURE.read_text()
    for package in ("contracts", "gateway", "kernels", "worker"):
        for file in (ROOT / package).rglob("__init__.py"):
            folder = f"{file.parent.relative_to(ROOT)}/"
            assert f"`{folder}" in text, f"{folder} is not in {ARCHITECTURE.name}"


# --- all pages


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.*)$", target.read_text(), re.M)
            assert anchor in {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}, link


def test_tests_that_pages_name_exist() -> None:
    named = [span for page in PAGES for span in spans(page.read_text()) if "::test_" in span]
    assert len(named) > 20
    for span in named:
        file, _, test = span.partition("::")
        assert re.search(rf"^(async )?def {test}\(", (ROOT / file).read_text(), re.M), span


def code_blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.M | re.S)


def commands() -> list[list[str]]:
    """Words of every command line of the pages that starts with a program of ours."""
    found = []
    for page in PAGES:
        for line in "".join(code_blocks(page, "bash")).replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words and words[0] in ("pagefleet", ".venv/bin/pagefleet", ".venv/bin/python", "make"):
                found.append([words[0].rpartition("/")[2], *words[1:]])
    return found


def test_make_targets() -> None:
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M)
    used = [words[1] for words in commands() if words[0] == "make"]
    assert used
    assert set(used) <= set(targets)


def test_commands_are_accepted() -> None:
    """Every `pagefleet …` of the pages has a command and options that there are."""
    lines = [words[1:] for words in commands() if words[0] == "pagefleet"]
    assert len(lines) > 10
    for words in lines:
        if words[0] == "worker":
            read_config(words[1:])
            continue
        command: click.Command = gateway_command if words[0] == "gateway" else pagefleet
        rest = words[1:] if words[0] == "gateway" else words
        while isinstance(command, click.Group):
            name, inner, rest = command.resolve_command(click.Context(command), rest)
            assert inner is not None, name
            command = inner
        command.make_context(words[0], rest)


def documented_commands() -> list[str]:
    """Every command that a page names in a code span or a block, without its options."""
    names = set()
    for page in PAGES:
        for match in re.finditer(r"pagefleet ((?:config )?[a-z]+)\b", page.read_text()):
            before = page.read_text()[match.start() - 1]
            if before in "`/\n":
                names.add(match[1])
    return sorted(names)


@pytest.mark.parametrize("name", documented_commands())
def test_help(name: str) -> None:
    if name in ("gateway", "worker"):  # they become another program: tests/gateway/test_cli.py
        assert pagefleet.get_command(click.Context(pagefleet), name) is not None
        return
    result = CliRunner().invoke(pagefleet, [*name.split(), "--help"])
    assert (result.exit_code, "sage:" in result.stdout) == (0, True)


def test_every_command_is_documented() -> None:
    documented = {name.split()[0] for name in documented_commands()}
    assert set(pagefleet.list_commands(click.Context(pagefleet))) - documented == set()


def test_benches_exist() -> None:
    modules = [words[2] for words in commands() if words[:2] == ["python", "-m"] and words[2] != "pip"]
    modules = [module for module in modules if module != "venv"]
    assert modules
    for module in modules:
        assert (ROOT / f"{module.replace('.', '/')}.py").is_file(), module
