"""`pagefleet chat`: talk to a model through the gateway."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import click
import httpx

from contracts.suggest import did_you_mean
from gateway.cli.common import fail, print_json, require_fleet, which_fleet
from gateway.fleet.statedir import StateDir

_TIMEOUT = httpx.Timeout(10, read=300)
_HELP = "/reset forgets the conversation, /quit or Ctrl-D ends, Ctrl-C cuts an answer short."

Message = dict[str, str]


class ChatError(Exception):
    """The gateway refused, or the answer broke off."""


@click.command()
@click.argument("model")
@which_fleet("-f", "--file")
@click.option("-p", "--prompt", help="Ask this once, print the answer and end.")
@click.option("--system", help="System message.")
@click.option(
    "--max-tokens", type=click.IntRange(min=1), help="Longest answer; default: what the model has room for."
)
@click.option("--temperature", type=click.FloatRange(min=0), default=0.6, show_default=True)
@click.option("--url", help="Address of the gateway; default: the running fleet's.")
@click.option("--api-key", envvar="PAGEFLEET_API_KEY", show_envvar=True, help="A key, where keys are needed.")
@click.option("--json", "as_json", is_flag=True, help="With -p: the whole answer as JSON.")
def chat(
    model: str,
    state: StateDir,
    prompt: str | None,
    system: str | None,
    max_tokens: int | None,
    temperature: float,
    url: str | None,
    api_key: str | None,
    as_json: bool,
) -> None:
    """Chat with a model: interactive, or one question with -p."""
    if as_json and prompt is None:
        raise click.UsageError("--json needs -p")
    body: dict[str, Any] = {"model": model, "temperature": temperature}
    if max_tokens is not None:
        body["max_tokens"] = max_tokens
    history: list[Message] = [{"role": "system", "content": system}] if system else []
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    base_url = url or require_fleet(state).url
    with httpx.Client(base_url=base_url, headers=headers, timeout=_TIMEOUT, trust_env=False) as client:
        try:
            if prompt is None:
                _converse(client, body, history)
            elif as_json:
                print_json(_ask(client, {**body, "messages": [*history, _user(prompt)]}))
            else:
                _answer(client, {**body, "messages": [*history, _user(prompt)]})
        except ChatError as error:
            fail(str(error))
        except httpx.TransportError as error:
            fail(f"no answer from {client.base_url}: {error}")


def _converse(client: httpx.Client, body: dict[str, Any], history: list[Message]) -> None:
    click.echo(f"{body['model']}. {_HELP}", err=True)
    start = list(history)
    person = sys.stdin.isatty()
    while True:
        try:
            text = input("> " if person else "").strip()
        except (EOFError, KeyboardInterrupt):
            if person:
                click.echo()
            return
        if text in ("/exit", "/quit"):
            return
        if text == "/reset":
            history = list(start)
        elif text == "/help":
            click.echo(_HELP, err=True)
        if text in ("", "/reset", "/help"):
            continue
        try:
            answer = _answer(client, {**body, "messages": [*history, _user(text)]})
        except ChatError as error:
            if not person:
                raise
            click.echo(f"error: {error}", err=True)
            continue
        history += [_user(text), {"role": "assistant", "content": answer}]


def _answer(client: httpx.Client, body: dict[str, Any]) -> str:
    """Prints the answer as it comes, and returns it; Ctrl-C ends it early. Every answer ends its line."""
    pieces: list[str] = []
    try:
        for piece in _stream(client, body):
            pieces.append(piece)
            click.echo(piece, nl=False)
            sys.stdout.flush()
    except KeyboardInterrupt:
        click.echo()
    except (ChatError, httpx.TransportError):
        if pieces:
            click.echo()
        raise
    else:
        click.echo()
    return "".join(pieces)


def _stream(client: httpx.Client, body: dict[str, Any]) -> Iterator[str]:
    """The answer's text. What the model thinks before it goes to stderr, so that who waits sees it."""
    thinking = False
    with client.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as response:
        if response.status_code != 200:
            response.read()
            raise ChatError(_message(client, response, body["model"]))
        for line in response.iter_lines():
            data = line.removeprefix("data:").strip()
            if not line.startswith("data:"):
                continue
            if data == "[DONE]":
                return
            event = json.loads(data)
            if "error" in event:
                raise ChatError(event["error"]["message"])
            for choice in event["choices"]:
                delta = choice["delta"]
                if delta.get("reasoning"):
                    thinking = True
                    click.secho(delta["reasoning"], dim=True, nl=False, err=True)
                if delta.get("content"):
                    if thinking:
                        click.echo("\n", err=True)
                    thinking = False
                    yield delta["content"]
    raise ChatError("the answer broke off")


def _ask(client: httpx.Client, body: dict[str, Any]) -> Any:
    response = client.post("/v1/chat/completions", json=body)
    if response.status_code != 200:
        raise ChatError(_message(client, response, body["model"]))
    return response.json()


def _message(client: httpx.Client, response: httpx.Response, model: str) -> str:
    try:
        error = response.json()["error"]
        message = str(error["message"])
    except (ValueError, KeyError, TypeError):
        return f"the gateway answered {response.status_code}"
    if error.get("code") == "model_not_found":
        return message.removesuffix(".") + did_you_mean(model, _models(client))
    keyless = response.status_code == 401 and "authorization" not in response.request.headers
    return f"{message} Give it with --api-key, or in PAGEFLEET_API_KEY." if keyless else message


def _models(client: httpx.Client) -> list[str]:
    """The names that the gateway lists; none where it doesn't."""
    try:
        return [str(model["id"]) for model in client.get("/v1/models").json()["data"]]
    except (httpx.TransportError, ValueError, KeyError, TypeError):
        return []


def _user(text: str) -> Message:
    return {"role": "user", "content": text}
