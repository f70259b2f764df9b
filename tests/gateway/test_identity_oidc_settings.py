"""The issuer in the fleet file: what is needed, and what is said of what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.config import ConfigError, load_fleet


def problems(tmp_path: Path, auth: str) -> str:
    file = tmp_path / "fleet.yaml"
    file.write_text(f"gateway:\n  auth: {auth}\nmodels:\n  - {{name: a, source: o/n}}\n")
    try:
        fleet = load_fleet(file)
    except ConfigError as error:
        return str(error)
    return "\n".join(fleet.warnings())


OIDC = "mode: oidc, issuer: 'https://id.example.com', audience: pagefleet"


@pytest.mark.parametrize(
    ("auth", "said"),
    [
        ("{mode: oidc}", "mode oidc needs issuer and audience"),
        ("{mode: oidc, issuer: 'https://x'}", "mode oidc needs audience"),
        ("{mode: oidc, issuer: 'http://id.example.com', audience: a}", "an https:// address is needed"),
        (f"{{{OIDC}, jwks_url: 'ftp://x/'}}", "gateway.auth.jwks_url: an https:// address is needed"),
        (f"{{{OIDC}, algorithms: [HS256]}}", "'HS256' can't be allowed"),
        (f"{{{OIDC}, algorithms: [none]}}", "'none' can't be allowed"),
        (f"{{{OIDC}, algorithms: []}}", "algorithms"),
        (f"{{{OIDC}, leeway: 1h}}", "a duration from 0s to 10m is needed"),
        (f"{{{OIDC}, cache: 1s}}", "a duration from 10s to 24h is needed"),
        (f"{{{OIDC}, user_claim: ''}}", "the name of a claim has 1 to 128"),
        (f"{{{OIDC}, user_claim: 'a\"b'}}", "without quotes"),
        (f"{{{OIDC}, user_clam: x}}", "did you mean 'user_claim'?"),
        (f"{{{OIDC}, trusted_proxies: [127.0.0.1]}}", "no effect with mode oidc"),
        ("{mode: keys, audience: x}", "gateway.auth.audience has no effect without mode oidc"),
        (f"{{{OIDC}}}", ""),
    ],
)
def test_settings(tmp_path: Path, auth: str, said: str) -> None:
    found = problems(tmp_path, auth)
    assert said in found
    assert bool(found) == bool(said)
