"""A scripted engine's own record of its requests and replies, to compare the traces with.

`EngineSide` is the script. It returns what was planned, in tokens that a tokenizer need not have chosen, and records
every completion, joined over several calls: a call whose prompt is another call's prompt and output continues that
completion.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from rollyard.testing.script import END, Reply, Turn
from rollyard.testing.scripted_sampling import cut_reply
from tests.gateway.site import Site


@dataclass(frozen=True)
class Plan:
    """The engine's next reply. `cuts` are the positions at which its text is split before it is tokenized."""

    text: str
    cuts: tuple[int, ...] = ()
    ends: bool = True
    latency_s: float | None = None
    stall_after: int | None = None


@dataclass
class Completion:
    """A completion as the engine has it: its prompt, its output so far, and its whole planned output."""

    prompt: list[int]
    plan: list[int]
    max_tokens: int
    ids: list[int] = field(default_factory=list)
    finish: str = "abort"

    @property
    def whole(self) -> list[int]:
        return self.prompt + self.ids


class EngineSide:
    """The script, and the record of its completions."""

    def __init__(self) -> None:
        self.plans: deque[Plan] = deque()
        self.completions: list[Completion] = []
        self.calls = 0
        self.site: Site

    def __call__(self, turn: Turn) -> Reply:
        if not turn.session_id:
            return Reply("ok")  # a probe
        self.calls += 1
        params: Mapping[str, Any] = self.site.engine.requests[-1].body["sampling_params"]
        prompt = list(turn.prompt_ids)
        plan = self.plans.popleft()
        completion = next((it for it in self.completions if it.ids and it.whole == prompt), None)
        if completion is None:
            completion = Completion(prompt, self._ids(plan), params["max_tokens"])
            self.completions.append(completion)
        if len(completion.ids) == len(completion.plan):
            completion.plan += self._encode(END)  # an engine samples at least one token
        max_tokens, stops = params["max_tokens"], params["stop_token_ids"]
        sampled, finish = cut_reply(completion.plan[len(completion.ids) :], max_tokens, stops)
        if plan.stall_after is not None:
            sampled = sampled[: plan.stall_after]
            finish = "length" if len(sampled) == max_tokens else "abort"
        completion.ids += sampled
        completion.finish = "stop" if sampled and sampled[-1] in stops else finish
        return Reply(token_ids=tuple(completion.plan), latency_s=plan.latency_s, stall_after=plan.stall_after)

    def _ids(self, plan: Plan) -> list[int]:
        ids: list[int] = []
        edges = sorted({0, *(cut for cut in plan.cuts if cut < len(plan.text)), len(plan.text)})
        for start, end in pairwise(edges):
            ids += self._encode(plan.text[start:end])
        return ids + (self._encode(END) if plan.ends or not ids else [])

    def _encode(self, text: str) -> list[int]:
        return self.site.engine.tokenizer.encode(text)
