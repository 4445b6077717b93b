"""Requests a completion from the engine, with the task's sampling and the parameters granted to the client."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from rollyard.core import Deadline, Run, Task, sampling_seed
from rollyard.core.failure import EngineRefused
from rollyard.engines.base import Generation, OnTokens, Session
from rollyard.gateway.exchange import Exchange
from rollyard.tokens import Renderer
from rollyard.tokens.splice import PreparedTurn


class CompletionSampler:
    """Samples the completions of one rollout."""

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
        """Samples one completion. If the engine refuses the granted parameters, the request is continued without them,
        so that a client's parameter cannot end the rollout. `salvage` gets what was sampled before a failure."""

        kept: list[Generation] = []  # what a try had sampled before it failed

        async def generate(start: Generation | None, on_tokens: OnTokens | None) -> Generation:
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
                salvage=kept.append,
                on_tokens=on_tokens,
                resume=start,
                stop=exchange.stop,
                stop_texts=granted.stop if granted.stop_at_engine else (),
                top_logprobs=granted.top_logprobs,
            )

        try:
            try:
                return await generate(resume, on_tokens)
            except EngineRefused as error:
                if not exchange.granted.has_engine_parameters or error.data.get("context"):
                    raise
            refused = exchange.granted
            exchange.granted = refused.plain(self._task.sampling, "this engine refuses it")
            start = kept.pop() if kept else None  # tokens that the client may have received already
            if start is not None:  # they were sampled with the client's constraint
                start = replace(start, untrainable=start.untrainable or refused.untrainable)
            return await generate(start, _after(len(start.token_ids), on_tokens) if start and on_tokens else on_tokens)
        except BaseException:
            if kept:
                salvage(kept.pop())
            raise


def _after(count: int, on_tokens: OnTokens) -> OnTokens:
    """`on_tokens` without the first `count` tokens."""

    def take(ids: Sequence[int]) -> None:
        nonlocal count
        skipped = min(count, len(ids))
        count -= skipped
        if len(ids) > skipped:
            on_tokens(ids[skipped:])

    return take
