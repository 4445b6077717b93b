"""The gateway for agents that run elsewhere: passes a call with a session's key to the gateway of that session.

It is in front of the routes, because it is the hot path of every step of every such agent. Responses and errors have
the format that the calling SDK expects. A key is sent as OpenAI's SDK does (`Authorization: Bearer KEY`) or as
Anthropic's does (`x-api-key: KEY`).

Invariants. These paths accept session keys and no other token; a session's key is valid for these paths only. A body is
counted as it streams in, as on all other paths.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from rollyard.agents.session import SessionAgent
from rollyard.core import RollyardError, id_of
from rollyard.gateway.app import GatewayApp, dialect_of, refuse, short_path
from rollyard.gateway.base import Problem
from rollyard.service.security.keys import SessionKeys

log = logging.getLogger("rollyard.service")

CALLS: Mapping[str, tuple[str, str]] = {
    "/v1/chat/completions": ("post", "A completion, as in OpenAI's Chat Completions API."),
    "/v1/responses": ("post", "A completion, as in OpenAI's Responses API."),
    "/v1/messages": ("post", "A completion, as in Anthropic's Messages API."),
    "/v1/messages/count_tokens": ("post", "The number of tokens of a message, as in Anthropic's API."),
    "/v1/models": ("get", "The model of the session."),
}

_MODELS = "/v1/models"


class AnsweredRoute:
    """The route template of a call, for the metrics."""

    def __init__(self, path: str) -> None:
        self.path = path


ROUTES = {path: AnsweredRoute(path) for path in CALLS}


class SessionGateway:
    """ASGI app that passes each call to the gateway of its session."""

    def __init__(self, keys: SessionKeys, sessions: SessionAgent, *, limit_bytes: int) -> None:
        self._keys = keys
        self._sessions = sessions
        self._limit_bytes = limit_bytes

    @staticmethod
    def has(path: str) -> bool:
        return path in CALLS or path.startswith(f"{_MODELS}/")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers: dict[bytes, bytes] = dict(scope["headers"])
        path = scope["path"] if scope["path"] in ROUTES else _MODELS
        scope["route"] = ROUTES[path]
        dialect = dialect_of(short_path(path), headers)
        is_started = False

        async def watched(message: Message) -> None:
            nonlocal is_started
            is_started = True
            await send(message)

        try:
            app = self._app(headers)
            self._check_length(headers)
            await app(scope, self._bounded(receive), watched)
        except Problem as problem:
            await refuse(send, dialect, problem)
        except Exception as error:
            if is_started:
                raise  # part of the response is sent: only closing the connection signals the error
            log.exception("a gateway call failed unexpectedly", extra={"path": path})
            await refuse(send, dialect, Problem("internal", f"{type(error).__name__}; see the service's log"))

    def refusal(self, scope: Scope, error: RollyardError) -> Response:
        """The gate's refusal of a call, in the error format of these paths."""
        dialect = dialect_of(short_path(scope["path"]), dict(scope["headers"]))
        body = dialect.error(Problem("unauthorized", error.detail, code=error.code))
        return Response(body, error.status, {"x-should-retry": "false"}, "application/json")

    def _app(self, headers: Mapping[bytes, bytes]) -> GatewayApp:
        keys = _keys_of(headers)
        if not keys:
            raise Problem("unauthorized", "this call needs a session's key (POST /v1/sessions)")
        match = next(filter(None, map(self._keys.session_of, keys)), None)
        if match is None:
            raise Problem("unauthorized", "this is not the key of a session")
        session, nonce = match
        live = self._sessions.live(session)
        if live is None:
            detail = f"session {id_of(session)} is not open: it has not started yet, or it has ended"
            raise Problem("unavailable", detail, code="not_open")
        if live.nonce != nonce:
            raise Problem("unauthorized", "this key belongs to an earlier session with this id")
        return GatewayApp(live.gateway, watches=True)

    def _check_length(self, headers: Mapping[bytes, bytes]) -> None:
        content_length = headers.get(b"content-length", b"0")
        if content_length.isdigit() and int(content_length) > self._limit_bytes:
            raise self._too_large()

    def _bounded(self, receive: Receive) -> Receive:
        received_bytes = 0

        async def counted() -> Message:
            nonlocal received_bytes
            message = await receive()
            received_bytes += len(message.get("body", b""))
            if received_bytes > self._limit_bytes:
                raise self._too_large()
            return message

        return counted

    def _too_large(self) -> Problem:
        return Problem("too_large", f"the body is larger than {self._limit_bytes} bytes", code="body_too_large")


def _keys_of(headers: Mapping[bytes, bytes]) -> list[str]:
    """The keys of both headers: an SDK may put an unrelated token of its own into one of them."""
    scheme, _, token = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
    bearer = token.strip() if scheme.lower() == "bearer" else ""
    return [key for key in (bearer, headers.get(b"x-api-key", b"").decode("latin-1").strip()) if key]


def describe(paths: dict[str, Any]) -> None:
    """Adds these calls to the OpenAPI description."""
    for path, (method, meaning) in CALLS.items():
        paths[path] = {
            method: {
                "tags": ["gateway"],
                "summary": meaning,
                "description": f"{meaning} Needs a session key, as `Authorization: Bearer` or `x-api-key`; errors have "
                "the dialect's own format.",
                "security": [{"session_key": []}, {"session_x_api_key": []}],
                "responses": {"200": {"description": "As documented for that API"}},
            }
        }
