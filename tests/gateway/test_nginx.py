"""nginx's configuration: every form is one that nginx takes, and no value becomes more than one word."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.fleet.errors import InvalidFleet
from gateway.fleet.nginx import NginxError, NginxOptions, check_with_nginx, render, warnings
from gateway.fleet.nginx_values import word
from gateway.fleet.state import Routes, RoutesFile
from tests.gateway.nginx_fleet import fleet_of, targets
from tests.gateway.nginx_server import standalone

FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "instances": {"upstreams": ("127.0.0.1:8001", "http://[::1]:8002", "unix:/run/a gateway.sock")},
    "addresses": {"listen": ("127.0.0.1:18080", "unix:nginx.sock")},
    "names": {"server_names": ("llm.example.org", "*.example.org")},
    "monitoring": {"monitoring": ("10.0.0.0/8", "::1")},
    "user": {"user_id": "client", "max_fails": 0, "fail_timeout": 1},
    "passwords": {"htpasswd": "/etc/a; b"},
    "path": {"per_model": "path"},
    "port": {"per_model": "port", "first_port": 19001},
}


NAMES = ("m", "M", "org/m", "org-m", "a:b@c+d", "m.x", "n" * 120)


@pytest.mark.nginx
@pytest.mark.parametrize("form", FORMS)
def test_a_real_nginx_takes_every_form(form: str, tmp_path: Path) -> None:
    options = FORMS[form]
    if form == "addresses":
        options = {"listen": ("127.0.0.1:18080", f"unix:{tmp_path}/n.sock")}
    models = {"m": Routes(model="m", epoch=1, targets=targets(9_500, 500, 0)),
              "M": Routes(model="M", epoch=1, targets=targets(10_000, state="down"))}  # fmt: skip
    fleet = fleet_of(tmp_path, *NAMES, auth={"forwarded_header": "forwarded"}, timeouts={"idle": "1.5s"})
    text = render(fleet, standalone(**options), RoutesFile(epoch=1, models=models))
    assert "successful" in check_with_nginx(text)
    if form in ("path", "port"):
        assert "weight=19" in text
        assert '"unix:/run/s 2.sock" max_fails=3 fail_timeout=10s down' in text
        assert "weight=0" not in text
    else:
        assert ("least_conn" in text) == (form == "instances")


@pytest.mark.nginx
def test_what_nginx_refuses_is_said_in_its_words(tmp_path: Path) -> None:
    options = standalone(certificate=f"{tmp_path}/none.pem", key=f"{tmp_path}/none.key", listen=("18443",))
    with pytest.raises(NginxError, match=r"none\.pem"):
        check_with_nginx(render(fleet_of(tmp_path), options))


@pytest.mark.parametrize(
    ("options", "gateway", "words"),
    [
        ({"certificate": "/c"}, {}, "--tls-key"),
        ({"listen": ("80; }",)}, {}, "--listen"),
        ({"listen": ("70000",)}, {}, "--listen"),
        ({"upstreams": ("http://a/b",)}, {}, "no address"),
        ({"upstreams": ("unix:" + "/x" * 60,)}, {}, "107"),
        ({"monitoring": ("10.0.0.1/8",)}, {}, "--monitoring"),
        ({"server_names": ("a$b",)}, {}, "dollar"),
        ({"access_log": "/a\nb"}, {}, "line breaks"),
        ({}, {"port": 0}, "--upstream"),
        ({"per_model": "path"}, {"auth": {"mode": "keys"}}, "leads past the gateway"),
        ({"per_model": "port", "first_port": 65535}, {}, "--first-port"),
        ({"htpasswd": "/u"}, {"auth": {"mode": "keys"}}, "--htpasswd"),
    ],
)
def test_what_can_not_be(options: Any, gateway: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidFleet, match=words):
        render(fleet_of(tmp_path, "m", "n", **gateway), NginxOptions(**options))


@given(st.text(max_size=40))
@settings(max_examples=150)
def test_a_value_stays_one_word(text: str) -> None:
    """What nginx's own reader makes of it is the text."""
    try:
        quoted = word(text)
    except InvalidFleet:
        assert "$" in text or not text.isprintable()
        return
    if not quoted.startswith('"'):
        assert quoted == text
        assert not set(text) & set(" ;{}'\"\\#$")
        return
    inside = quoted[1:-1]
    read, escaped = "", False
    for char in inside:
        if not escaped and char == "\\":
            escaped = True
            continue
        assert escaped or char != '"', "the quotes end inside"
        read, escaped = read + char, False
    assert not escaped
    assert read == text


def test_warnings(tmp_path: Path) -> None:
    def lines(auth: Any, **options: Any) -> str:
        return "\n".join(warnings(fleet_of(tmp_path, auth=auth), NginxOptions(**options)))

    assert "127.0.0.1 to gateway.auth.trusted_proxies" in lines({})
    assert "add unix: to" in lines({}, upstreams=("unix:/g.sock",))
    assert lines({"trusted_proxies": ["127.0.0.0/8"]}) == ""
    assert lines({"mode": "keys"}) == ""
    assert "in the clear" in lines({"mode": "keys"}, listen=("0.0.0.0:80",))
    assert "past the gateway" in lines({}, per_model="path")
