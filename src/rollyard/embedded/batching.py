"""Continuous batching: sequences join and leave between two steps of the model.

A step computes the next token of every running sequence, and as many prompt tokens as fit into `chunk_tokens`, so a
long prompt does not block the others. The state of a sequence is its tokens: those that are not in its cache yet are
computed next. A prompt, a continuation, a sequence that lost its cache to another (preempted), and one whose cache was
cleared because the weights changed are therefore the same case.

All caches, running and kept (`prefixes.py`), share one memory limit. Kept caches are evicted first; then the youngest
running sequence returns to the queue, and computes its cache again when there is room. One sequence of the longest
context always fits, so the oldest always continues.

Why not transformers' own continuous batching (5.22): it returns logprobs of the processed distribution, cancels
requests and shares prefixes. But it has one random stream for all requests (no seeds), returns no top logprobs, does
not answer a cancelled request, and cannot clear the caches of running requests or report which weights sampled a token.

Not thread-safe: the worker's thread owns it.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from rollyard.embedded.base import MOST_BURST, Piece
from rollyard.embedded.transformer.prefixes import CachedPrefix, PrefixCache

if TYPE_CHECKING:
    from rollyard.embedded.transformer.attention import Kv
    from rollyard.embedded.transformer.llama import Llama
    from rollyard.embedded.transformer.model import Model
    from rollyard.embedded.transformer.paged import PagedKv
    from rollyard.embedded.transformer.sampling import SampledDraw, SamplingRule
    from rollyard.embedded.transformer.stacked import StackedKv

Finish = Literal["stop", "length"]
Kind = Literal["prompts", "tokens", "burst"]
"""The kind of a step: with parts of prompts in it, one token for each sequence, or several."""

KINDS: tuple[Kind, ...] = ("prompts", "tokens", "burst")

MANY = 4  # prompts start at once if at least one waits for each 4 running sequences


@dataclass(frozen=True, slots=True)
class Settings:
    """Limits of batching and memory."""

    max_running: int = 64  # sequences in a step
    chunk_tokens: int = 512  # prompt tokens in a step
    cache_bytes: int = 2 << 30  # for keys and values, running and kept
    max_calls: int = 4096  # running and waiting; a further call gets status 503
    gather_steps: int | None = None  # see `_can_start_prompts`; None: on a GPU 8, else 0
    burst: int | None = None  # see `_burst_size`, and `bursts.py`; None: on a GPU 8, else 1
    cache: Literal["auto", "ragged", "paged"] = "auto"  # paged on a GPU (`paged.py`), else ragged (`attention.py`)


@dataclass(frozen=True, slots=True)
class Request:
    """A validated sampling request with its own seed."""

    prompt: Sequence[int]
    max_tokens: int
    seed: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop_ids: frozenset[int] = frozenset()
    top: int = 0
    salt: str = ""
    session: str = ""
    priority: int = 0  # lower is earlier

    @property
    def is_plain(self) -> bool:
        """Whether it samples from all tokens and returns no top logprobs."""
        return self.top_k <= 0 and self.top_p >= 1.0 and self.top == 0


class BatchedSequence:
    """A waiting or running sequence: its request, and its tokens so far."""

    def __init__(self, request: Request, number: int) -> None:
        self.request = request
        self.tokens = list(request.prompt)
        self.kv: Kv | PagedKv | StackedKv | None = None  # while it runs
        self.cached_tokens: int | None = None  # prompt tokens found in a kept cache; known once it has started
        self.order = (request.priority, number)

    @property
    def sampled(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    def draw(self) -> SamplingRule:
        """Returns how its next token is sampled."""
        from rollyard.embedded.transformer.sampling import SamplingRule

        r = self.request
        return SamplingRule(r.temperature, r.top_p, r.top_k, r.seed, len(self.tokens), r.top)


@dataclass(slots=True)  # not frozen: see `base.Piece`
class SampledToken:
    """One new token of a sequence."""

    job: BatchedSequence
    drawn: SampledDraw
    version: str  # of the weights that sampled it
    finish: Finish | None


@dataclass(slots=True)
class BatcherCounts:
    """Counters since the start."""

    preemptions: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    sampled_tokens: int = 0
    steps: dict[Kind, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    step_s: dict[Kind, float] = field(default_factory=lambda: dict.fromkeys(KINDS, 0.0))


class Batcher:
    """Chooses the sequences of each step, runs the model, and manages the memory of all caches."""

    def __init__(self, model: Model | Llama, settings: Settings) -> None:
        self.model = model
        self.settings = settings
        self.version = "default"  # vLLM's name for weights without a version
        self.counts = BatcherCounts()
        self.running: list[BatchedSequence] = []  # oldest first: the order in which they get memory
        self.waiting: list[BatchedSequence] = []
        self.prefixes = PrefixCache()
        self._numbers = 0
        self._gathered = 0  # steps during which a prompt has waited, or may have waited in a burst
        is_gpu = model.device.type == "cuda"
        self._gather_steps = (8 if is_gpu else 0) if settings.gather_steps is None else settings.gather_steps
        self._most_tokens = settings.cache_bytes // model.bytes_per_token
        if settings.cache == "paged" or (settings.cache == "auto" and is_gpu):
            self._most_tokens = model.take_pool(self._most_tokens)
        self._burst_tokens = (8 if is_gpu else 1) if settings.burst is None else min(settings.burst, MOST_BURST)
        if self._most_tokens < model.new_kv().capacity_for(model.max_context):
            raise ValueError(
                f"a cache of {settings.cache_bytes >> 20} MiB holds {self._most_tokens} tokens, "
                f"fewer than the context of {model.max_context}"
            )

    # --- between steps

    def add(self, request: Request) -> BatchedSequence:
        self._numbers += 1
        sequence = BatchedSequence(request, self._numbers)
        bisect.insort(self.waiting, sequence, key=_order)
        return sequence

    def drop(self, job: BatchedSequence) -> None:
        """Removes a sequence and keeps its cache for reuse. A sequence that has ended is ignored."""
        if job in self.running:
            self._end(job)
        elif job in self.waiting:
            self.waiting.remove(job)

    def clear(self, *, with_running: bool) -> bool:
        """Clears kept caches, and those of running sequences if `with_running`. Returns whether no cache is left."""
        self.prefixes.clear()
        cached = [job for job in self.running if job.kv is not None and job.kv.length]
        if with_running:
            for job in cached:
                assert job.kv is not None
                job.kv.free()
                job.kv = self.model.new_kv()
            self.model.forget_numbers()
        return with_running or not cached

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    @property
    def use(self) -> float:
        """The fraction of the memory that running sequences hold. Kept caches do not count: they can be evicted."""
        return min(1.0, self._running_tokens() / self._most_tokens)

    def give_up(self) -> list[BatchedSequence]:
        """After a failed step, removes and returns all running sequences; if there are none, all waiting ones, because
        starting one of them failed. Clears every cache: its content may be incomplete or not finite."""
        if self.running:
            failed, self.running = self.running, []
        else:
            failed, self.waiting = self.waiting, []
        for job in failed:
            self._drop_cache(job)
        self.prefixes.clear()
        return failed

    # --- one step

    def step(self) -> list[SampledToken]:
        from torch import inference_mode  # pyright: ignore[reportMissingImports]

        started = time.monotonic()
        with inference_mode():
            if not (chosen := self._choose()):
                return []
            has_prompts = any(len(piece.tokens) > 1 for _, piece in chosen)
            count = self._burst_size(chosen)
            sampled = self._burst(chosen, count) if count > 1 else self._single(chosen)
        kind: Kind = "burst" if count > 1 else "prompts" if has_prompts else "tokens"
        self.counts.steps[kind] += 1
        self.counts.step_s[kind] += time.monotonic() - started
        self.counts.sampled_tokens += len(sampled)
        return sampled

    def _choose(self) -> list[tuple[BatchedSequence, Piece]]:
        """Returns the sequences of this step, each with the tokens that it computes."""
        chosen: list[tuple[BatchedSequence, Piece]] = []
        budget = self.settings.chunk_tokens
        for job in list(self.running):
            if job.kv is None:
                continue  # preempted by an older sequence
            piece = self._piece(job, budget)
            if piece is not None:
                budget -= len(piece.tokens) if len(piece.tokens) > 1 else 0
                chosen.append((job, piece))
        is_open = self._can_start_prompts()
        while is_open and self.waiting and len(self.running) < self.settings.max_running and budget > 0:
            job = self.waiting[0]
            if not self._begin(job):
                break
            piece = self._piece(job, budget)
            if piece is None:
                break
            budget -= len(piece.tokens)
            chosen.append((job, piece))
        return chosen

    def _single(self, chosen: Sequence[tuple[BatchedSequence, Piece]]) -> list[SampledToken]:
        from rollyard.embedded.transformer.sampling import sample

        logits = self.model.forward([piece for _, piece in chosen])
        ready = [job for job, piece in chosen if piece.wants_logits]
        if not ready:
            return []
        drawn = sample(logits, [job.draw() for job in ready])
        return [self._take(job, one) for job, one in zip(ready, drawn, strict=True)]

    def _burst_size(self, chosen: Sequence[tuple[BatchedSequence, Piece]]) -> int:
        """Returns how many tokens each sequence samples on the device before Python reads them. It is 1 unless every
        sequence has one token to compute, every request `is_plain`, and there is room. No sequence exceeds its
        max_tokens, and no prompt waits longer than `gather_steps`."""
        count = min(self._burst_tokens, *(job.request.max_tokens - job.sampled for job, _ in chosen))
        if self.waiting:
            count = min(count, self._gather_steps + 1 - self._gathered)
        is_plain = all(piece.wants_logits and len(piece.tokens) == 1 and job.request.is_plain for job, piece in chosen)
        if count <= 1 or not is_plain or not self.model.has_bursts:
            return 1
        caches = [piece.kv for _, piece in chosen]
        more = sum(kv.capacity_for(kv.length + count) - kv.capacity for kv in caches)
        if self._running_tokens() + more > self._most_tokens or not self._make_room(more):
            return 1  # checked first: no kept cache is evicted for a burst that does not happen
        for kv in caches:
            kv.reserve(kv.length + count)
        return count

    def _burst(self, chosen: Sequence[tuple[BatchedSequence, Piece]], count: int) -> list[SampledToken]:
        drawn_rows = self.model.burst([piece for _, piece in chosen], [job.draw() for job, _ in chosen], count)
        self._gathered += count - 1
        steps: list[SampledToken] = []
        for (job, piece), drawn in zip(chosen, drawn_rows, strict=True):
            for one in drawn:
                piece.kv.advance(1)
                steps.append(self._take(job, one))
                if steps[-1].finish is not None:
                    break
        return steps

    def _can_start_prompts(self) -> bool:
        """Whether prompts start in this step. On a GPU a few prompts cost as much as many and delay all running
        sequences, so they are gathered for at most `gather_steps` steps, unless many wait or nothing is running."""
        if not self.waiting:
            self._gathered = 1  # for prompts that arrive during this step
            return False
        self._gathered += 1
        if self.running and len(self.waiting) * MANY < len(self.running) and self._gathered <= self._gather_steps:
            return False
        self._gathered = 0
        return True

    def _piece(self, job: BatchedSequence, budget: int) -> Piece | None:
        """Returns what a sequence computes in this step, or None if the step is full or the sequence was preempted."""
        kv = job.kv
        assert kv is not None
        todo = len(job.tokens) - kv.length
        if todo == 1 and kv.length < kv.capacity:  # nearly always
            return Piece(job.tokens[-1:], kv, True)
        count = 1 if todo == 1 else min(todo, budget)
        if count <= 0:
            return None
        while not self._make_room(kv.capacity_for(kv.length + count) - kv.capacity):
            youngest = self.running[-1]
            self._preempt(youngest)
            if youngest is job:
                return None
        kv.reserve(kv.length + count)  # at once: the next sequence needs to know what is left
        return Piece(job.tokens[kv.length : kv.length + count], kv, count == todo)

    def _take(self, job: BatchedSequence, drawn: SampledDraw) -> SampledToken:
        job.tokens.append(drawn.token)
        request = job.request
        finish: Finish | None = None
        if drawn.token in request.stop_ids:
            finish = "stop"
        elif job.sampled >= request.max_tokens:
            finish = "length"
        if finish is not None:
            self._end(job)
        return SampledToken(job, drawn, self.version, finish)

    # --- joining and leaving

    def _begin(self, job: BatchedSequence) -> bool:
        """Starts the first waiting sequence with the longest kept prefix. Returns False if there is no room yet."""
        request, size = job.request, len(job.tokens)
        fresh = self.model.new_kv()
        # without the last token: it must be computed to get the logits
        match = self.prefixes.find(job.tokens[:-1], request.salt, request.session)
        if match is None:
            if not self._make_room(fresh.capacity_for(size)):
                return False
            kv = fresh
        else:
            prefix, shared = match
            # a session that continues, not one that went back to its start: that one may continue where it was
            is_own = request.session and prefix.session == request.session and 2 * shared >= len(prefix.tokens)
            if is_own or not self._make_room(fresh.capacity_for(size), prefix):
                self.prefixes.take(prefix)
                if not self._make_room(prefix.kv.capacity_for(size)):
                    self.prefixes.keep(prefix.tokens, prefix.kv, prefix.salt, prefix.session)
                    return False
                kv = prefix.kv
                kv.cut(shared)
            else:
                self.prefixes.touch(prefix)
                kv = prefix.kv.copy(shared, size)
        kv.reserve(size)
        self.waiting.remove(job)
        job.kv = kv
        bisect.insort(self.running, job, key=_order)
        if job.cached_tokens is None:  # counted once, also after a preemption
            job.cached_tokens = kv.length
            self.counts.prompt_tokens += size
            self.counts.cached_tokens += kv.length
        return True

    def _end(self, job: BatchedSequence) -> None:
        self.running.remove(job)
        kv, job.kv = job.kv, None
        if kv is not None:
            self.prefixes.keep(job.tokens, kv, job.request.salt, job.request.session)

    def _preempt(self, job: BatchedSequence) -> None:
        self.counts.preemptions += 1
        self.running.remove(job)
        self._drop_cache(job)
        bisect.insort(self.waiting, job, key=_order)

    def _drop_cache(self, job: BatchedSequence) -> None:
        kv, job.kv = job.kv, None
        if kv is not None:
            kv.free()

    # --- memory

    def _make_room(self, tokens: int, spared: CachedPrefix | None = None) -> bool:
        """Evicts kept caches until `tokens` more fit. Evicted caches are lost even if it returns False."""
        while tokens > 0 and self._running_tokens() + self.prefixes.capacity_tokens + tokens > self._most_tokens:
            if not self.prefixes.forget_oldest(spared):
                return False
        return True

    def _running_tokens(self) -> int:
        return sum(kv.capacity for job in self.running if (kv := job.kv) is not None)


def _order(job: BatchedSequence) -> tuple[int, int]:
    return job.order
