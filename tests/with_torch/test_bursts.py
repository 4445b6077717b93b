# pyright: reportMissingImports=false
"""A burst samples the same tokens as single steps, and respects the limits of every request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rollyard.embedded.base import BLOCK_TOKENS
from rollyard.embedded.batching import Batcher, Request, SampledToken, Settings
from rollyard.embedded.transformer.bursts import advance
from rollyard.embedded.transformer.graphs import Graphs
from rollyard.embedded.transformer.model import Model
from tests.with_torch.parts import ask, batcher_of, ids_of, logprobs_of, prompt_of, run, tiny

PLAIN = [
    ask(prompt_of(5), 20, 1),
    ask(prompt_of(70, 1), 9, 2, temperature=0.6),
    ask(prompt_of(1, 2), 14, 3, temperature=1.5),
    ask(prompt_of(33, 3), 11, 4, temperature=0.0),
]


def reused(graphs: Graphs, size: Any, make: Callable[[], Any], act: Callable[[Any], Any]) -> Any:
    """As on a GPU: the tensors are reused, so they contain values of the recording and of earlier bursts."""
    if size not in graphs._recorded:
        inputs = make()
        act(inputs)
        graphs._recorded[size] = (inputs, lambda: act(inputs))
    return graphs._recorded[size]


@pytest.fixture(params=["unpadded", "padded", "padded and kept"])
def module(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    if request.param != "unpadded":
        monkeypatch.setattr("rollyard.embedded.transformer.paged.ROUNDED", {"cpu"})
    if request.param == "padded and kept":
        monkeypatch.setattr(Graphs, "of", reused)
    return tiny()


def paged(module: Any, burst: int, **settings: Any) -> Batcher:
    return batcher_of(module, cache="paged", burst=burst, **settings)


def sizes(batcher: Batcher) -> list[int]:
    """Returns how many tokens each step sampled."""
    counts: list[int] = []
    while batcher.has_work:
        counts.append(len(batcher.step()))
    return counts


@pytest.mark.parametrize(
    ("burst", "apart", "chunk_tokens"),
    [(2, 0, 512), (5, 2, 512), (99, 2, 512), (5, 0, 1)],  # a chunk of 1: token by token
)
def test_a_burst_samples_the_same_as_single_steps(module: Any, burst: int, apart: int, chunk_tokens: int):
    single, bursts = paged(module, 1), paged(module, burst, chunk_tokens=chunk_tokens)
    for one, many in zip(run(single, PLAIN, steps_between=apart), run(bursts, PLAIN, steps_between=apart), strict=True):
        assert ids_of(many) == ids_of(one)
        assert logprobs_of(many) == pytest.approx(logprobs_of(one), abs=1e-5)
        assert [step.finish for step in many] == [step.finish for step in one]


def test_a_burst_is_limited_by_the_smallest_max_tokens(module: Any):
    batcher = paged(module, 8)
    for request in (ask(prompt_of(5), 20), ask(prompt_of(9), 6)):
        batcher.add(request)
    assert sizes(batcher) == [2, 2 * 5, 8, 6]
    assert batcher.counts.steps == {"prompts": 1, "tokens": 0, "burst": 3}
    assert batcher.counts.sampled_tokens == 26
    spent = batcher.counts.step_s
    assert spent["prompts"] > 0 and spent["burst"] > 0 and spent["tokens"] == 0


class Blind(TorchDispatchMode):
    """As a GPU while it records: reading a value, or a size that depends on one, fails."""

    LOOKS = (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero, torch.ops.aten.masked_select)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket not in self.LOOKS, f"{func} reads a value"
        return func(*args, **(kwargs or {}))


def test_a_burst_reads_no_value_so_it_can_be_recorded(module: Any, monkeypatch: pytest.MonkeyPatch):
    recorded: list[Any] = []

    def blindly(rows: Any, run: Any) -> None:
        with Blind():
            advance(rows, run)
        recorded.append(rows)

    monkeypatch.setattr("rollyard.embedded.transformer.paged.advance", blindly)
    (steps,) = run(paged(module, 8), [ask(prompt_of(5), 20)])
    assert len(steps) == 20 and recorded
    with pytest.raises(AssertionError, match="reads a value"), Blind():
        torch.ones(3)[torch.tensor([True, False, True])].sum().item()


def test_a_stop_within_a_burst_ends_the_sequence_and_its_cache_is_valid(module: Any):
    (steps,) = run(paged(module, 1), [ask(prompt_of(5), 20)])
    ids = ids_of(steps)
    stop = next(token for token in ids[3:6] if token not in ids[:3])
    request = ask(prompt_of(5), 20, stop_ids=frozenset({stop}), session="s")
    batcher = paged(module, 8)
    (stopped,) = run(batcher, [request])
    assert ids_of(stopped) == ids[: ids.index(stop) + 1] and stopped[-1].finish == "stop"
    continuation = ask([*request.prompt, *ids_of(stopped), 7, 8], 6, session="s")
    (after,) = run(batcher, [continuation])
    assert after[0].job.cached_tokens == 5 + len(stopped) - 1, "all but the last token, which has not been computed"
    assert ids_of(after) == ids_of(run(paged(module, 1), [continuation])[0])


@pytest.mark.parametrize("fields", [{"top_k": 5}, {"top_p": 0.9}, {"top": 2}], ids=str)
def test_requests_with_cuts_or_top_logprobs_are_sampled_step_by_step(module: Any, fields: dict[str, Any]):
    batcher = paged(module, 8)
    batcher.add(ask(prompt_of(5), 4, **fields))
    batcher.add(ask(prompt_of(6), 4))
    assert sizes(batcher) == [2, 2, 2, 2]


def test_waiting_prompts_shorten_a_burst_and_start_after_it(module: Any):
    batcher = paged(module, 8, gather_steps=2)
    for n in range(9):
        batcher.add(ask(prompt_of(4, n), 40, n))
    assert len(batcher.step()) == 9
    late = batcher.add(ask(prompt_of(6), 40))
    assert len(batcher.step()) == 9 * 2, "at most gather_steps steps while a prompt waits"
    assert late not in batcher.running
    assert len(batcher.step()) == 10
    assert len(batcher.step()) == 10 * 8
    later = batcher.add(ask(prompt_of(6, 1), 30))
    assert len(batcher.step()) == 11 and later in batcher.running, "the burst counts as waiting"


def test_the_length_of_a_burst_counts_as_waiting_for_prompts_that_arrive_in_it(module: Any):
    batcher = paged(module, 4, gather_steps=4)
    for n in range(9):
        batcher.add(ask(prompt_of(4, n), 40, n))
    assert [len(batcher.step()) for _ in range(2)] == [9, 9 * 4]
    late = batcher.add(ask(prompt_of(6), 30))
    assert len(batcher.step()) == 10 and late in batcher.running
    batcher.add(ask(prompt_of(6, 1), 1))
    assert len(batcher.step()) == 10 * 4, "it arrived after the step, and waits"


def small(module: Any, burst: int, blocks: int) -> Batcher:
    model = Model(module, max_context=64)
    model.check()
    return Batcher(
        model, Settings(cache="paged", burst=burst, cache_bytes=blocks * BLOCK_TOKENS * model.bytes_per_token)
    )


def test_results_are_the_same_when_memory_is_short(module: Any):
    requests: list[Request] = [ask(prompt_of(25 + n, n), 30, n) for n in range(5)]
    one, many = (run(small(module, burst, 4), requests) for burst in (1, 8))
    assert [ids_of(steps) for steps in many] == [ids_of(steps) for steps in one]


def test_no_kept_cache_is_evicted_for_a_burst_that_does_not_fit(module: Any):
    batcher = small(module, 8, 6)
    run(batcher, [ask(prompt_of(9, 9), 2, session="kept")])
    for n in range(5):
        batcher.add(ask(prompt_of(29, n), 30, n))
    assert [len(batcher.step()) for _ in range(2)] == [5, 5], (
        "one block for each, full after these tokens; none for a burst"
    )
    assert len(batcher.prefixes) == 1


def test_another_default_dtype_changes_nothing(module: Any):
    before = torch.get_default_dtype()
    (expected,) = run(paged(module, 1), PLAIN[1:2])
    batcher = paged(module, 8)
    try:
        torch.set_default_dtype(torch.bfloat16)
        (steps,) = run(batcher, PLAIN[1:2])
    finally:
        torch.set_default_dtype(before)
    assert ids_of(steps) == ids_of(expected)
    assert logprobs_of(steps) == pytest.approx(logprobs_of(expected), abs=1e-5)


def test_non_finite_weights_fail_a_burst(module: Any):
    batcher = paged(module, 8)
    batcher.add(ask(prompt_of(5), 20))
    steps: list[SampledToken] = batcher.step()
    assert len(steps) == 1
    with torch.no_grad():
        module.model.norm.weight.fill_(float("nan"))
    with pytest.raises(ArithmeticError, match="not finite"):
        batcher.step()
