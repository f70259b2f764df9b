"""JSON schemas that only a document without end could meet: a part that must be there needs itself."""

from __future__ import annotations

from typing import Any, TypeGuard
from urllib.parse import unquote


def is_endless(schema: Any) -> bool:
    """Whether no document can meet `schema` because of its references to itself. What is known to end grows
    until nothing is added (a least fixed point); where more than references decides, a part counts as one
    that ends. RecursionError for a schema that is nested too deeply."""
    waiting = {reference: _target(schema, reference) for reference in _references(schema)}
    ending: set[str] = set()
    while added := [reference for reference, part in waiting.items() if _ends(part, ending)]:
        ending.update(added)
        for reference in added:
            del waiting[reference]
    return not _ends(schema, ending)


def _references(part: Any) -> set[str]:
    """Those of `part` that lead into the schema itself."""
    if isinstance(part, list):
        return set().union(*map(_references, part))
    if not isinstance(part, dict):
        return set()
    reference = part.get("$ref")
    found = set().union(*map(_references, part.values()))
    if _is_own(reference):
        found.add(reference)
    return found


def _is_own(reference: Any) -> TypeGuard[str]:
    return isinstance(reference, str) and (reference == "#" or reference.startswith("#/"))


def _target(schema: Any, reference: str) -> Any:
    """What a reference leads to; True, which everything meets, where that is nowhere: an error elsewhere."""
    part = schema
    for step in unquote(reference).split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(part, dict) and name in part:
            part = part[name]
        elif isinstance(part, list) and name.isdecimal() and int(name) < len(part):
            part = part[int(name)]
        else:
            return True
    return part


def _ends(part: Any, ending: set[str]) -> bool:
    """Whether a document can meet `part` when the references that lead to an end are those of `ending`."""
    if not isinstance(part, dict) or "const" in part or "enum" in part:
        return True
    reference = part.get("$ref")
    if _is_own(reference) and reference not in ending:
        return False
    for alternatives in (part.get("anyOf"), part.get("oneOf")):
        if isinstance(alternatives, list) and not any(_ends(one, ending) for one in alternatives):
            return False
    return all(_ends(one, ending) for one in _needed(part))


def _needed(part: dict[str, Any]) -> list[Any]:
    """The parts that are in every document that meets `part`."""
    needed = list(part["allOf"]) if isinstance(part.get("allOf"), list) else []
    kind = part.get("type")
    properties, required, first = part.get("properties"), part.get("required"), part.get("prefixItems")
    if kind in ("object", ["object"]) and isinstance(properties, dict) and isinstance(required, list):
        needed += [properties[name] for name in required if isinstance(name, str) and name in properties]
    least = part.get("minItems")
    if kind in ("array", ["array"]) and isinstance(least, int) and least > 0:
        first = first if isinstance(first, list) else []
        needed += first[:least]
        if least > len(first):
            needed.append(part.get("items"))
    return needed
