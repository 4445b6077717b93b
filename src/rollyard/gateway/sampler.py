"""How a completion of the gateway is asked for: the task's sampling, and what its client was granted beside it."""

from __future__ import annotations

from collections.abc import Callable

from rollyard.core import Deadline, Run, Task, sampling_seed
from rollyard.core.failure import EngineRefused
from rollyard.engines.base import Generation, OnTokens, Session
from rollyard.gateway.exchange import Exchange
from rollyard.tokens import Renderer
from rollyard.tokens.splice import PreparedTurn


class CompletionSampler:
    """One rollout's: see the module."""

    def __init__(
        self, session: Session, renderer: Renderer, *, task: Task, run: Run, rollout_id: str, clock: Deadline
    ) -> None:
        self._session = session
        self._renderer = renderer
        self._task = task
        self._run = run
        self._rollout_id = rollout_id
        self._clock = clock

    async def sample(
        self,
        exchange: Exchange,
        turn: PreparedTurn,
        number: int,
        *,
        max_tokens: int,
        resume: Generation | None,
        on_tokens: OnTokens | None,
        salvage: Callable[[Generation], None],
    ) -> Generation:
        """An engine that refuses what the client was granted is asked again without it: a client's word ends no
        rollout."""

        async def asked() -> Generation:
            granted = exchange.granted
            of = number if granted.seed is None else -1 - granted.seed  # no turn has such a number
            return await self._session.generate(
                turn.prompt,
                sampling=granted.sampling,
                max_tokens=max_tokens,
                seed=sampling_seed(self._run.seed, self._rollout_id, of),
                stop_token_ids=self._renderer.stop_token_ids,
                clock=self._clock,
                model_s=self._task.limits.model_s,
                salvage=salvage,
                on_tokens=on_tokens,
                resume=resume,
                stop=exchange.stop,
                stop_texts=granted.stop if granted.stop_at_engine else (),
                top_logprobs=granted.top_logprobs,
            )

        try:
            return await asked()
        except EngineRefused as error:
            if not exchange.granted.asks_engine or error.data.get("context"):
                raise
        exchange.granted = exchange.granted.plain(self._task.sampling, "this engine refuses it")
        return await asked()
