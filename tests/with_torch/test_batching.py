# pyright: reportMissingImports=false
"""Sequences that share steps, caches and memory give the same results as alone."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from rollyard.embedded.batching import Batcher, Request
from tests.with_torch.parts import (
    CACHES,
    END,
    SETTINGS,
    ask,
    batcher_of,
    ids_of,
    logprobs_of,
    plain_logprobs,
    prompt_of,
    run,
    tiny,
)

pytestmark = pytest.mark.usefixtures("cache")

MIXED = [
    ask(prompt_of(5), 20, 1),
    ask(prompt_of(70, 1), 9, 2, temperature=0.6, top_k=20),
    ask(prompt_of(1, 2), 14, 3, temperature=1.5, top_p=0.8),
    ask(prompt_of(33, 3), 11, 4, temperature=0.0),
]


def unbatched(module: Any, request: Request) -> tuple[list[int], list[float]]:
    (steps,) = run(batcher_of(module), [request])
    return ids_of(steps), logprobs_of(steps)


def test_logprobs_equal_those_of_a_plain_forward_pass(module: Any):
    for request, steps in zip(MIXED, run(batcher_of(module), MIXED), strict=True):
        assert len(steps) == request.max_tokens and steps[-1].finish == "length"
        assert logprobs_of(steps) == pytest.approx(plain_logprobs(module, request, ids_of(steps)), abs=1e-4)


@pytest.mark.parametrize(
    ("settings", "apart"),
    [({}, 0), ({"chunk_tokens": 7}, 3), ({"max_running": 2, "chunk_tokens": 16}, 0), ({"gather_steps": 2}, 3)],
    ids=str,
)
def test_batched_equals_alone(settings: dict[str, int], apart: int):
    module = tiny()
    for request, steps in zip(MIXED, run(batcher_of(module, **settings), MIXED, steps_between=apart), strict=True):
        ids, logprobs = unbatched(module, request)
        assert ids_of(steps) == ids
        assert logprobs_of(steps) == pytest.approx(logprobs, abs=1e-4)


def test_a_continuation_with_the_same_seed_equals_an_uninterrupted_completion():
    module = tiny()
    request = ask(prompt_of(12), 16)
    ids, _ = unbatched(module, request)
    batcher = batcher_of(module)
    continuation = ask([*request.prompt, *ids[:6]], 10)
    ((*steps,),) = run(batcher, [continuation])
    assert ids_of(steps) == ids[6:]


def test_a_stop_token_ends_the_completion_and_is_kept():
    module = tiny()
    ids, _ = unbatched(module, ask(prompt_of(5), 20))
    stop = ids[4]
    ((*steps,),) = run(batcher_of(module), [ask(prompt_of(5), 20, stop_ids=frozenset({stop, END}))])
    assert ids_of(steps) == ids[: ids.index(stop) + 1] and steps[-1].finish == "stop"


# --- prefixes


def turns(module: Any, batcher: Batcher, **fields: Any) -> tuple[list[int], list[int]]:
    """Runs two turns of a session. Returns the cached tokens of the second, and its tokens."""
    first = ask(prompt_of(40), 8, session="s", **fields)
    ((*steps,),) = run(batcher, [first])
    second = ask([*first.prompt, *ids_of(steps), *prompt_of(6, 9)], 8, session="s", **fields)
    ((*more,),) = run(batcher, [second])
    assert logprobs_of(more) == pytest.approx(plain_logprobs(module, second, ids_of(more)), abs=1e-4)
    assert ids_of(more) == unbatched(module, second)[0]
    return [step.job.cached_tokens or 0 for step in more[:1]], ids_of(more)


def test_the_next_turn_of_a_session_reuses_its_prefix_without_changing_the_result(module: Any):
    batcher = batcher_of(module)
    (cached,), _ = turns(module, batcher)
    assert cached == 40 + 8 - 1, "all but the last token, which had not been computed"
    assert batcher.counts.cached_tokens == cached
    assert len(batcher.prefixes) == 1, "the extended prefix is kept only once"


def test_a_prefix_is_not_found_with_another_salt():
    module = tiny()
    batcher = batcher_of(module)
    run(batcher, [ask(prompt_of(40), 4, session="s", salt="p:1")])
    ((step, *_),) = run(batcher, [ask(prompt_of(40), 4, session="s", salt="p:2")])
    assert step.job.cached_tokens == 0


def test_another_session_copies_the_common_prefix_and_the_owner_keeps_its_cache():
    module = tiny()
    batcher = batcher_of(module)
    run(batcher, [ask(prompt_of(40), 4, session="a")])
    sibling = ask([*prompt_of(30), *prompt_of(5, 7)], 6, session="b")
    ((*steps,),) = run(batcher, [sibling])
    assert steps[0].job.cached_tokens == 30
    assert ids_of(steps) == unbatched(module, sibling)[0]
    ((step, *_),) = run(batcher, [ask(prompt_of(40), 4, session="a")])
    assert step.job.cached_tokens == 39


def test_a_cleared_cache_is_not_found_and_running_sequences_compute_it_again():
    module = tiny()
    batcher = batcher_of(module)
    run(batcher, [ask(prompt_of(40), 4, session="a")])
    request = ask(prompt_of(20, 5), 12, session="b")
    job = batcher.add(request)
    steps = [step for _ in range(2) for step in batcher.step()]
    assert batcher.clear(with_running=False) is False, "a running sequence keeps its cache"
    assert batcher.clear(with_running=True) is True
    while batcher.has_work:
        steps += batcher.step()
    assert ids_of(steps) == unbatched(module, request)[0]
    assert job.cached_tokens == 0
    ((step, *_),) = run(batcher, [ask(prompt_of(40), 4, session="a")])
    assert step.job.cached_tokens == 0


# --- memory


def used_bytes(batcher: Batcher) -> int:
    capacity = batcher.prefixes.capacity_tokens + sum(job.kv.capacity for job in batcher.running if job.kv)
    return capacity * batcher.model.bytes_per_token


def small_batcher(module: Any, contexts: float, **settings: Any) -> Batcher:
    """Returns a batcher with memory for `contexts` sequences of the longest context, which is short."""
    from rollyard.embedded.batching import Settings
    from rollyard.embedded.transformer.model import Model

    model = Model(module, max_context=256)
    model.check()
    memory = int(contexts * 256 * model.bytes_per_token)
    return Batcher(model, Settings(**{**SETTINGS, "cache": CACHES[-1], **settings, "cache_bytes": memory}))


def test_preempted_sequences_resume_with_the_same_result():
    module = tiny()
    batcher = small_batcher(module, 2.0)
    requests = [ask(prompt_of(60 + n, n), 90, n) for n in range(4)]
    for request, steps in zip(requests, run(batcher, requests), strict=True):
        assert ids_of(steps) == unbatched(module, request)[0]
    assert batcher.counts.preemptions > 0


def test_memory_is_never_exceeded():
    module, rng = tiny(), random.Random(4)
    batcher = small_batcher(module, 1.5, max_running=5, chunk_tokens=48)
    live: list[Any] = []
    expected: dict[Any, int] = {}
    most = 0
    for n in range(60):
        if rng.random() < 0.4:
            length = rng.randrange(1, 200)
            request = ask(
                prompt_of(length, rng.randrange(3)), rng.randrange(1, 50), n, session=str(n % 4), priority=n % 3
            )
            job = batcher.add(request)
            live.append(job)
            expected[job] = request.max_tokens
        if live and rng.random() < 0.1:
            dropped = live.pop(rng.randrange(len(live)))
            batcher.drop(dropped)
            expected.pop(dropped, None)
        batcher.step()
        most = max(most, used_bytes(batcher))
        assert most <= batcher.settings.cache_bytes
        assert 0 <= batcher.use <= 1
    while batcher.has_work:
        batcher.step()
        assert used_bytes(batcher) <= batcher.settings.cache_bytes
    assert all(job.sampled == count for job, count in expected.items())
    assert most > 0.8 * batcher.settings.cache_bytes, "it was scarce"


def test_a_cache_smaller_than_one_context_is_refused():
    with pytest.raises(ValueError, match="fewer than the context"):
        small_batcher(tiny(), 0.9)


# --- versions and order


def test_a_version_applies_from_the_next_token():
    batcher = batcher_of(tiny())
    batcher.add(ask(prompt_of(5), 6))
    steps = batcher.step() + batcher.step()
    batcher.version = "7"
    before = len(steps)
    while batcher.has_work:
        steps += batcher.step()
    assert [step.version for step in steps] == ["default"] * before + ["7"] * (6 - before)
    assert before in (2, 5), "the first step is the prompt; the second may be a burst"


def test_a_more_urgent_request_starts_first():
    batcher = batcher_of(tiny(), max_running=1)
    late, early = ask(prompt_of(4), 2, priority=0), ask(prompt_of(4, 1), 2, priority=-5)
    jobs = [batcher.add(late), batcher.add(early)]
    order = []
    while batcher.has_work:
        order += [step.job for step in batcher.step() if step.finish]
    assert order == jobs[::-1]


def test_prompts_are_gathered_for_a_limited_number_of_steps():
    batcher = batcher_of(tiny(), gather_steps=2, burst=1)
    busy = [batcher.add(ask(prompt_of(4, n), 30, n)) for n in range(9)]
    batcher.step()
    assert batcher.running == busy, "prompts do not wait if nothing is running"
    late = batcher.add(ask(prompt_of(6), 30))
    has_started = []
    for _ in range(3):
        batcher.step()
        has_started.append(late in batcher.running)
    assert has_started == [False, False, True]
    some = [batcher.add(ask(prompt_of(6, n), 30)) for n in (1, 2)]
    batcher.step()
    assert not any(one in batcher.running for one in some), "two of ten are few"
    some.append(batcher.add(ask(prompt_of(6, 3), 30)))
    batcher.step()
    assert all(one in batcher.running for one in some), "three of ten are many"


def test_non_finite_weights_leave_nothing_behind():
    """Masked values are multiplied by zero, so they must be finite."""
    module = tiny()
    request = ask(prompt_of(9), 6)
    ids, _ = unbatched(module, request)
    batcher = batcher_of(module, chunk_tokens=4)
    weight = module.model.layers[0].self_attn.v_proj.weight
    good = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(float("nan"))
        batcher.add(request)
        batcher.step()  # the first chunk of the prompt, before any sampling
        weight.copy_(good)
    batcher.clear(with_running=True)
    sampled_ids: list[int] = []
    while batcher.has_work:
        sampled_ids += ids_of(batcher.step())
    assert sampled_ids == ids
