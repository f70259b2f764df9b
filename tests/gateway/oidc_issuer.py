"""A small OpenID Connect issuer: a real HTTP server with discovery document and keys, and its tokens."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from joserfc import jwt
from joserfc.jwk import ECKey, OKPKey, RSAKey

AUDIENCE = "pagefleet"
KEYS = "/keys"
DISCOVERY = "/.well-known/openid-configuration"


class Issuer:
    """`keys`: what it signs with and publishes. `answers`: path → (status, body) in place of the usual."""

    def __init__(self) -> None:
        self.keys: list[Any] = [rsa("rsa-1")]
        self.answers: dict[str, tuple[int, bytes]] = {}
        self.asked: list[str] = []
        self.pause = 0.0
        self._port = 0
        self.start()
        self.url = f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        issuer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                issuer.asked.append(self.path)
                time.sleep(issuer.pause)
                status, body = issuer.answer(self.path)
                self.send_response(status)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *arguments: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", self._port), Handler)
        self._port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        """Until it is started again, connections are refused."""
        self._server.shutdown()
        self._server.server_close()

    def answer(self, path: str) -> tuple[int, bytes]:
        if path in self.answers:
            return self.answers[path]
        if path == KEYS:
            return 200, json.dumps({"keys": [key.as_dict(private=False) for key in self.keys]}).encode()
        if path == DISCOVERY:
            return 200, json.dumps({"issuer": self.url, "jwks_uri": self.url + KEYS}).encode()
        return 404, b""

    def claims(self, **changes: Any) -> dict[str, Any]:
        now = int(time.time())
        usual = {"iss": self.url, "aud": AUDIENCE, "sub": "alice", "iat": now, "exp": now + 300}
        return {name: value for name, value in {**usual, **changes}.items() if value is not None}

    def token(self, key: Any = None, alg: str = "RS256", header: Any = None, **changes: Any) -> str:
        """A good token, but for `changes` of its claims (None leaves one out)."""
        key = key or self.keys[0]
        head = {"alg": alg, "kid": key.get("kid"), **(header or {})}
        head = {name: value for name, value in head.items() if value is not None}
        return jwt.encode(head, self.claims(**changes), key, algorithms=[alg])


def rsa(kid: str | None, bits: int = 2048, **parameters: Any) -> Any:
    return RSAKey.generate_key(bits, {"use": "sig", **({"kid": kid} if kid else {}), **parameters})


def ec(kid: str, curve: str = "P-256") -> Any:
    return ECKey.generate_key(curve, {"kid": kid})


def okp(kid: str) -> Any:
    return OKPKey.generate_key("Ed25519", {"kid": kid})
