"""A client that executes given moves and holds the expected results: which prompt begins with which sampled tokens,
which completion belongs to which request, and, at the end, what the traces contain.
"""

import asyncio
import json
import unicodedata
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import aiohttp
import pytest

from rollyard.testing.scripted_sampling import scripted_logprob
from rollyard.tokens.splice import ABANDONED
from tests.gateway.clients import Answer, Client, History, InputMessage, Results, Style, content_key
from tests.gateway.engine_side import Completion, EngineSide, Plan
from tests.gateway.site import Site

ENOUGH = 2000  # tokens; more than any reply has
SYSTEM = InputMessage("system", "Be brief.")


@dataclass(frozen=True)
class Move:
    """`kind` selects the method (`Program.do_…`); the other fields are its arguments, as far as it needs them."""

    kind: str
    text: str
    other: str
    plan: Plan
    second: Plan
    style: Style
    is_stream: bool
    max_tokens: int
    stall_after: int  # tokens that are sampled before the client disconnects
    which: int


@dataclass(frozen=True)
class Request:
    history: History
    raw: bytes
    is_stream: bool


class Program:
    """One random client, and the results that it expects."""

    def __init__(self, site: Site, http: aiohttp.ClientSession, client: Client, engine: EngineSide) -> None:
        self.site, self.http, self.client, self.engine = site, http, client, engine
        self.has_reasoning = True
        self.may_not_extend = False  # the renderer cannot extend every turn
        self.histories: list[History] = [()]  # histories that were received; each ends with an answer
        self.known: dict[str, list[Completion]] = {}  # such a history → the completions that led to it
        self.answers: dict[bytes, dict[str, Answer]] = {}  # a body → its answers by id
        self.lost: dict[bytes, Completion] = {}  # a body → the completion that its client did not wait for
        self.last: Request | None = None
        self.last_text: str | None = None  # the text that was planned for it
        self.interrupted: Request | None = None
        self.pairs = 0

    async def do(self, move: Move) -> None:
        await getattr(self, f"do_{move.kind}")(move)

    # --- moves

    async def do_next(self, move: Move) -> None:
        await self.ask(self.request(self.going_on(self.histories[-1], move), move), move.plan)

    async def do_branch(self, move: Move) -> None:
        base = self.histories[move.which % len(self.histories)]
        await self.ask(self.request(self.going_on(base, move), move), move.plan)

    async def do_edit(self, move: Move) -> None:
        history = list(self.going_on(self.histories[-1], move))
        at = move.which % len(history)
        entry = history[at]
        if isinstance(entry, InputMessage):
            history[at] = replace(entry, text=move.other)
        elif isinstance(entry, Results):
            history[at] = Results((move.other, *entry.texts[1:]))
        elif not entry.items:
            history[at] = replace(entry, content=move.other)
        await self.ask(self.request(tuple(history), move), move.plan)

    async def do_strip(self, move: Move) -> None:
        history = self.going_on(self.histories[-1], move)
        bare = tuple(entry.without_reasoning() if isinstance(entry, Answer) else entry for entry in history)
        await self.ask(self.request(bare, move), move.plan)

    async def do_compact(self, move: Move) -> None:
        history = (SYSTEM, InputMessage("user", f"So far: {move.text}"))
        await self.ask(self.request(history, move), move.plan)

    async def do_again(self, move: Move) -> None:
        """Repeats a request: a new sample, unless its client had left. It may be the same text in other tokens."""
        request, plan = self.last or self.request(self.going_on((), move), move), move.plan
        if self.last_text is not None and move.which % 2:
            plan = replace(plan, text=self.last_text, ends=True)
        await self.ask(request, plan)

    async def do_retry(self, move: Move) -> None:
        if self.last is None or self.last.raw in self.lost:
            await self.do_next(move)
            return
        before = self.engine.calls
        answer = await self.send(self.last, is_retry=True)
        assert answer.content_key == self.answers[self.last.raw][answer.id].content_key
        assert self.engine.calls == before

    async def do_join(self, move: Move) -> None:
        """Retries while the first request still runs, or has just ended: one completion for both."""
        request = self.request(self.going_on(self.histories[-1], move), move)
        if request.raw in self.lost:
            await self.ask(request, move.plan)
            return
        first = asyncio.create_task(self.ask(request, replace(move.plan, latency_s=0.02)))
        await self.site.engine.busy()
        second = await self.send(request, is_retry=True)
        first_answer = await first
        assert (second.id, second.content_key) == (first_answer.id, first_answer.content_key)

    async def do_leave(self, move: Move) -> None:
        """Disconnects while the engine samples."""
        request = self.request(self.going_on(self.histories[-1], move), move)
        completion = self.lost.get(request.raw)
        if completion is not None and completion.finish != "abort":
            await self.ask(request, move.plan)  # everything was sampled already, and the reply is immediate
            return
        self.engine.plans.append(replace(move.plan, stall_after=move.stall_after))
        asking = asyncio.create_task(self.send(request))
        await self.site.engine.busy()
        asking.cancel()
        await asyncio.wait({asking})
        await self.site.engine.idle()
        if completion is None or not completion.ids:
            completion = self.engine.completions[-1]
            self.check_prompt(request.history, completion)
        self.lost[request.raw] = completion
        self.interrupted = request

    async def do_return(self, move: Move) -> None:
        """Repeats the request that it did not wait for."""
        request, self.interrupted = self.interrupted, None
        if request is None:
            await self.do_next(move)
        else:
            await self.ask(request, move.plan, is_retry=move.which % 2 == 0)

    async def do_interrupted(self, move: Move) -> None:
        await self.do_leave(move)
        if self.interrupted is not None:
            await self.do_return(replace(move, plan=move.second))

    async def do_pair(self, move: Move) -> None:
        """Sends two requests concurrently, of one history or of two."""
        self.pairs += 1
        left = self.request(self.going_on(self.histories[-1], move), replace(move, max_tokens=ENOUGH - 2 * self.pairs))
        base = self.histories[move.which % len(self.histories)]
        other = self.going_on(base, replace(move, text=move.other))
        right = self.request(other, replace(move, max_tokens=ENOUGH - 2 * self.pairs + 1))
        right = left if move.which % 2 else right
        before = len(self.engine.completions)
        self.engine.plans += [replace(plan, latency_s=0.01) for plan in (move.plan, move.second)]
        answers = await asyncio.gather(self.send(left), self.send(right))
        new = self.engine.completions[before:]
        assert len(new) == 2 and answers[0].id != answers[1].id
        for request, answer in zip((left, right), answers, strict=True):
            max_tokens = ENOUGH - 2 * self.pairs + (request is not left)
            for completion in new:
                if completion.max_tokens == max_tokens:
                    self.record_reply(request, answer, completion)

    # --- parts of moves

    def going_on(self, history: History, move: Move) -> History:
        if not history:
            return (SYSTEM, InputMessage("user", move.text))
        answer = history[-1]
        assert isinstance(answer, Answer)
        user = InputMessage("user", move.text)
        if not answer.calls:
            return (*history, user)
        results = Results(tuple(move.other for _ in answer.calls))
        return (*history, results, user) if move.which % 3 == 0 else (*history, results)

    def request(self, history: History, move: Move) -> Request:
        body = self.client.body(history, move.style, max_tokens=move.max_tokens, is_stream=move.is_stream)
        return Request(history, json.dumps(body, ensure_ascii=False).encode(), move.is_stream)

    async def send(self, request: Request, *, is_retry: bool = False) -> Answer:
        headers = {"content-type": "application/json", "x-stainless-retry-count": "1" if is_retry else "0"}
        async with self.http.post(self.site.url + self.client.path, data=request.raw, headers=headers) as answer:
            raw = await answer.read()
            assert answer.status == 200, raw
            return self.client.read(raw, is_stream=request.is_stream)

    async def ask(self, request: Request, plan: Plan, *, is_retry: bool = False) -> Answer:
        resumed = self.lost.pop(request.raw, None)
        before, calls = len(self.engine.completions), self.engine.calls
        was_whole = resumed is not None and resumed.ids and resumed.finish != "abort"
        self.engine.plans.append(plan)
        answer = await self.send(request, is_retry=is_retry)
        self.engine.plans.clear()
        if resumed is None or not resumed.ids:
            assert len(self.engine.completions) == before + 1
            completion = self.engine.completions[-1]
            self.last_text = plan.text
        else:
            assert len(self.engine.completions) == before
            assert self.engine.calls == calls + (not was_whole)
            completion = resumed
        self.record_reply(request, answer, completion)
        return answer

    def record_reply(self, request: Request, answer: Answer, completion: Completion) -> None:
        self.check_prompt(request.history, completion)
        self.answers.setdefault(request.raw, {})[answer.id] = answer
        self.last = request
        whole = (*request.history, answer)
        self.histories.append(whole)
        self.known.setdefault(content_key(whole, has_reasoning=self.has_reasoning), []).append(completion)

    # --- expectations

    def check_prompt(self, history: History, completion: Completion) -> None:
        """Checks that a prompt begins with the sampled tokens, if its history was received, and contains all of it."""
        answered = max((at + 1 for at, entry in enumerate(history) if isinstance(entry, Answer)), default=0)
        before = self.known.get(content_key(history[:answered], has_reasoning=self.has_reasoning), [])
        if before and not any(completion.prompt[: len(it.whole)] == it.whole for it in before):
            assert self.may_not_extend and any(map(self.is_thinking, before)), "not what was sampled"
        text = unicodedata.normalize("NFC", self.decode(completion.prompt))
        for entry in history:
            for one in (
                (entry.text,) if isinstance(entry, InputMessage) else entry.texts if isinstance(entry, Results) else ()
            ):
                assert unicodedata.normalize("NFC", one) in text

    def is_thinking(self, completion: Completion) -> bool:
        """Whether it ended within its thinking."""
        (opened,), (closed,) = map(self.site.engine.tokenizer.encode, ("<think>", "</think>"))
        ids = completion.ids
        return opened in ids and closed not in ids[ids.index(opened) :]

    def decode(self, ids: list[int]) -> str:
        return self.site.engine.tokenizer.decode(ids)

    def check_traces(self) -> None:
        """Verifies the traces. Each completion has one owner, with its own tokens after its own prompt."""
        abandoned = [id(completion) for completion in self.lost.values()]
        expected = Counter(
            (tuple(it.prompt), tuple(it.ids), it.finish, ABANDONED if id(it) in abandoned else None)
            for it in self.engine.completions
            if it.ids
        )
        trajectory = self.site.verified()
        owned: Counter[Any] = Counter()
        for trace in trajectory.traces:
            ids, logprobs = trace.token_ids, trace.logprobs
            assert logprobs is not None
            for span in trace.spans:
                if not span.is_owned:
                    continue
                sampled = tuple(ids[span.start : span.end])
                owned[tuple(ids[: span.start]), sampled, span.finish_reason, trace.untrainable_reason] += 1
                scripted = [scripted_logprob(ids[at - 1], at, ids[at]) for at in range(span.start, span.end)]
                assert list(logprobs[span.start : span.end]) == pytest.approx(scripted)
            if trace.untrainable_reason is not None:
                assert sum(span.is_owned for span in trace.spans) == 1
        assert owned == expected
        assert self.site.forks.get(ABANDONED, 0) == sum(bool(it.ids) for it in self.lost.values())
