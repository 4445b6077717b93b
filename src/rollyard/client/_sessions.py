"""A session: a model endpoint for an agent of yours, and a call for its reward. Created by `AsyncClient.session`.

    async with service.session(run="grpo-7b") as session:
        client = openai.AsyncOpenAI(base_url=session.base_url, api_key=session.key)
        ...                                       # your agent, unchanged
        record = await session.reward(1.0)        # the session is a rollout like any other

Invariant: a block that is left without a reward, by an error or by mistake, cancels the session, instead of leaving it
open until its deadline. `Session` is the same without `await`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from types import TracebackType
from urllib.parse import quote

from rollyard.client._transport import Transport
from rollyard.client._waiting import POLL_S
from rollyard.client.records import JsonObject, Record, read, read_object
from rollyard.core import RollyardError, check_id
from rollyard.core.failure import SessionConflict

log = logging.getLogger("rollyard.client")


class AsyncSession:
    """A session as a context manager. `base_url` is for OpenAI's SDK, `root_url` for Anthropic's, which adds /v1."""

    id: str
    key: str
    model: str

    def __init__(self, wire: Transport, body: Mapping[str, object], timeout_s: float | None) -> None:
        self._wire = wire
        self._body = body
        self._timeout_s = timeout_s
        self._path = f"/sessions/{quote(check_id(str(body['id'])), safe=':')}"
        self._run = str(body.get("run") or "default")
        self._is_over = False
        self._is_confirmed = False  # the service has confirmed a session with this body
        self.id = str(body["id"])
        self.key = ""
        self.model = ""

    @property
    def base_url(self) -> str:
        return f"{self._wire.place.url}/v1"

    @property
    def root_url(self) -> str:
        return self._wire.place.url

    async def __aenter__(self) -> AsyncSession:
        """Waits until it is open. Raises SessionConflict if it has ended, and TimeoutError after `timeout_s`."""
        give_up = None if self._timeout_s is None else time.monotonic() + self._timeout_s
        try:
            while True:
                poll_s = POLL_S if give_up is None else min(POLL_S, max(0.0, give_up - time.monotonic()))
                params = {"wait_s": poll_s}
                opened = read_object(
                    await self._wire.json(
                        "POST", "/sessions", body=self._body, params=params, wait_s=poll_s, is_repeatable=True
                    )
                )
                self._is_confirmed = True
                if opened.get("is_open"):
                    self.key, self.model = str(opened["key"]), str(opened["model"])
                    return self
                if opened.get("state") == "ended":
                    self._is_over = True
                    raise _ended(self.id, opened)
                if give_up is not None and time.monotonic() >= give_up:
                    raise TimeoutError(f"session {self.id} is in {opened.get('state')} after {self._timeout_s:g} s")
        except BaseException as error:
            # A refusal creates no session, and its id may be another's; after other errors it is unknown.
            if self._is_confirmed or not _is_refusal(error):
                await self._cancel()
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._cancel()

    async def reward(
        self,
        reward: float,
        *,
        components: Mapping[str, float] | None = None,
        metrics: Mapping[str, float] | None = None,
        answer: str | None = None,
    ) -> Record:
        """Ends the session and returns its record. Raises SessionConflict if it had ended before."""
        values = {"reward": reward, "components": components, "metrics": metrics, "answer": answer}
        body = {name: value for name, value in values.items() if value is not None}
        params = {"wait_s": POLL_S, "run": self._run}
        while True:
            reply = await self._wire.json(
                "POST", f"{self._path}/reward", body=body, params=params, wait_s=POLL_S, is_repeatable=True
            )
            record = read(reply, Record)
            if record.is_ended:
                self._is_over = True
                return record

    async def status(self) -> JsonObject:
        """Its state, turns, tokens and forks so far."""
        return read_object(await self._wire.json("GET", self._path, params={"run": self._run}))

    async def _cancel(self) -> None:
        if self._is_over:
            return
        self._is_over = True
        try:
            await self._wire.json("DELETE", self._path, params={"run": self._run})
        except RollyardError as error:  # its deadline ends it; the error of the block matters more
            log.warning("a session could not be cancelled", extra={"session": self.id, "code": error.code})


def _is_refusal(error: BaseException) -> bool:
    return isinstance(error, RollyardError) and 400 <= error.status < 500


def _ended(session_id: str, opened: JsonObject) -> SessionConflict:
    failure = opened.get("failure") or {}
    why = f"{failure.get('code')}: {failure.get('detail')}" if failure else str(opened.get("outcome"))
    return SessionConflict(f"session {session_id} has already ended ({why})")
