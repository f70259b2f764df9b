"""YAML with places: the data, the line of every key, and the keys that are written twice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import yaml
from yaml.reader import ReaderError

KeyPath = tuple[str | int, ...]

_MAX_NODES = 100_000  # nested anchors can make a small file expand without end


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong: where (a file with its line, or a variable), which key, what."""

    source: str
    line: int | None
    key: str
    message: str

    def __str__(self) -> str:
        where = self.source if self.line is None else f"{self.source}:{self.line}"
        return ": ".join(part for part in (where, self.key, self.message) if part)


@dataclass
class YamlSource:
    """A parsed document: `data`, the 1-based line of every key path, and what was wrong with it as YAML."""

    name: str
    data: Any = None
    lines: dict[KeyPath, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    unusable: bool = False

    def line(self, path: KeyPath) -> int:
        """The line of the key, or of the nearest thing around it that is written in the file."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.lines:
                return self.lines[path[:length]]
        return 1


def dotted(path: KeyPath) -> str:
    """``models[0].worker.gpus``"""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def parse_yaml(text: str, name: str) -> YamlSource:
    """Parses with the safe loader; problems (syntax, double keys, keys that aren't text) are collected.

    `data` is None when there is nothing that can be used.
    """
    source = YamlSource(name)
    try:
        loader = yaml.SafeLoader(text)
    except ReaderError as error:
        what = f"the character {chr(error.character)!r} isn't allowed in it; take it out"
        place = text.count("\n", 0, error.position) + 1
        source.problems.append(Problem(name, place, "", f"this isn't YAML: {what}"))
        return source
    try:
        node = loader.get_single_node()
        if node is None:
            source.problems.append(Problem(name, 1, "", "the file is empty"))
            return source
        _Walk(source, _check_keys).visit(node, ())
        data = loader.construct_document(node)
        # Constructing has put merge keys (<<) into their mappings, so this pass sees them too.
        _Walk(source, _note_lines).visit(node, ())
        source.data = None if source.unusable else data
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else None
        source.problems.append(Problem(name, line, "", f"this isn't YAML: {error.problem or error.context}"))
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        source.problems.append(Problem(name, None, "", f"this isn't YAML that can be read: {reason}"))
    finally:
        loader.dispose()
    return source


class _Walk:
    """Visits every mapping once per path that leads to it, each with its path."""

    def __init__(
        self, source: YamlSource, on_mapping: Callable[[YamlSource, yaml.MappingNode, KeyPath], None]
    ) -> None:
        self._source = source
        self._on_mapping = on_mapping
        self._open: set[int] = set()
        self._visited = 0

    def visit(self, node: yaml.Node, path: KeyPath) -> None:
        self._visited += 1
        if self._visited > _MAX_NODES:
            raise ValueError(f"it expands to more than {_MAX_NODES} entries")
        if id(node) in self._open:
            raise ValueError(f"an anchor in line {node.start_mark.line + 1} contains itself")
        self._open.add(id(node))
        if isinstance(node, yaml.MappingNode):
            self._on_mapping(self._source, node, path)
            for key, value in node.value:
                self.visit(value, (*path, _text(key)))
        elif isinstance(node, yaml.SequenceNode):
            for index, value in enumerate(node.value):
                self._source.lines[(*path, index)] = value.start_mark.line + 1
                self.visit(value, (*path, index))
        self._open.discard(id(node))


def _text(key: yaml.Node) -> str:
    return str(key.value) if isinstance(key, yaml.ScalarNode) else "?"


def _check_keys(source: YamlSource, node: yaml.MappingNode, path: KeyPath) -> None:
    first: dict[str, int] = {}
    for key, _ in node.value:
        line = key.start_mark.line + 1
        if key.tag == "tag:yaml.org,2002:merge":
            continue
        text = _text(key)
        problem = None
        if key.tag != "tag:yaml.org,2002:str":
            source.unusable = True
            problem = "a key must be text; put it in quotes"
        elif text in first:
            problem = f"this key is already in line {first[text]}; keep one of them"
        if problem is not None:
            source.problems.append(Problem(source.name, line, dotted((*path, text)), problem))
        first.setdefault(text, line)


def _note_lines(source: YamlSource, node: yaml.MappingNode, path: KeyPath) -> None:
    for key, _ in node.value:
        source.lines[(*path, _text(key))] = key.start_mark.line + 1
