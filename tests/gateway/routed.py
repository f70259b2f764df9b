"""Routes documents of one model, and claims by them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gateway.fleet.state import Routes, RoutesFile, Target, write_routes
from gateway.routing import Router
from gateway.targets import Backend


def ready(slot: str, weight_bp: int = 10_000, **fields: Any) -> Target:
    return Target(
        slot=slot, generation=1, address=f"unix:/{slot}", weight_bp=weight_bp, **{"state": "ready", **fields}
    )


def write(path: Path, *targets: Target, epoch: int = 1, **fields: Any) -> None:
    routes = Routes(model="m", epoch=epoch, aliases=("nick",), targets=targets, **fields)
    write_routes(path, RoutesFile(epoch=epoch, models={"m": routes}))


def claim(router: Router, user: str = "u", **options: Any) -> Backend:
    backend = router.claim("m", user, **options)
    assert backend is not None
    return backend


def slots(router: Router, count: int, user: str = "u") -> list[str]:
    return [claim(router, user).target.slot for _ in range(count)]


def replicas(path: Path, count: int, epoch: int = 1) -> None:
    write(path, *(ready(f"r{index}") for index in range(count)), epoch=epoch)
