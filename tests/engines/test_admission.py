"""The rules of the session cap, and their effect on an engine with an unknown cache size."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hypothesis import given
from hypothesis import strategies as st

from rollyard.core.engine import Admission
from rollyard.engines import EngineSpec, Kind, Role
from rollyard.engines.clients.load import EngineLoad
from rollyard.engines.pool.admission import CapRules, SessionCap

RULES = CapRules()
LOOK_S = 2.0
SPEC = EngineSpec("e", "http://x", Kind.VLLM, capacity=64)

LOADS = st.builds(EngineLoad, st.floats(0, 1), st.integers(0, 300), st.integers(0, 300), st.integers(0, 50))
LOOKS = st.lists(st.tuples(LOADS, st.integers(0, 400), st.integers(0, 9), st.floats(0.01, 30)), max_size=60)


def started(cap: int = 16, ceiling: int = 256) -> SessionCap:
    session_cap = SessionCap(ceiling, replace(RULES, start=cap))
    session_cap.observe(EngineLoad(0.0), 0, 0, 0.0)
    assert session_cap.current == cap
    return session_cap


@given(LOOKS, st.integers(1, 300))
def test_the_cap_follows_the_rules_for_any_load(looks: list[tuple[EngineLoad, int, int, float]], ceiling: int) -> None:
    cap, now_s, fell_s = SessionCap(ceiling), 0.0, float("-inf")
    assert cap.current is None
    for load, sessions, wanting, passed_s in looks:
        now_s += passed_s
        before = cap.current
        cap.observe(load, sessions, wanting, now_s)
        assert cap.current is not None and cap.floor <= cap.current <= ceiling
        if before is None:
            continue
        if cap.current > before:
            assert wanting and sessions >= before and load.running and load.kv_use < RULES.target
            assert cap.current <= 2 * before and now_s - fell_s >= RULES.settle_s
        if cap.current < before:
            assert sessions <= before and load.running and now_s - fell_s >= RULES.settle_s
            assert cap.current == max(cap.floor, int(sessions * RULES.backoff))
            fell_s = now_s


@given(LOOKS)
def test_a_fixed_cap_is_the_capacity_for_any_load(looks: list[tuple[EngineLoad, int, int, float]]) -> None:
    cap, now_s = SessionCap.of(replace(SPEC, admission=Admission.FIXED)), 0.0
    assert cap is not None and cap.current == 64
    for load, sessions, wanting, passed_s in looks:
        now_s += passed_s
        cap.observe(load, sessions, wanting, now_s)
        cap.restart()
        assert cap.current == 64


def test_a_judge_has_no_cap() -> None:
    assert SessionCap.of(replace(SPEC, role=Role.JUDGE)) is None


def test_a_cap_that_starts_late_allows_the_live_sessions() -> None:
    cap = SessionCap(256)
    cap.observe(EngineLoad(0.3, running=50), 90, 5, 0.0)
    assert cap.current == 90


def test_the_cap_grows_only_if_it_was_the_limit() -> None:
    cap = started()
    for sessions, wanting in ((15, 5), (16, 0)):
        cap.observe(EngineLoad(0.1, running=9), sessions, wanting, 100.0)
        assert cap.current == 16
    cap.observe(EngineLoad(0.1, running=9), 16, 1, 100.0)
    assert cap.current == 32


def test_slow_start_doubles_once_per_settling_time_and_not_beyond_the_target() -> None:
    cap = started()
    cap.observe(EngineLoad(0.1, running=9), 16, 9, 1.0)
    assert cap.current == 16
    cap.observe(EngineLoad(0.1, running=9), 16, 9, RULES.settle_s)
    assert cap.current == 32
    cap.observe(EngineLoad(0.49, running=9), 32, 9, 2 * RULES.settle_s)
    assert cap.current == int(32 * RULES.target / 0.49)


def test_the_load_of_an_idle_engine_is_ignored() -> None:
    cap = started()
    for kv_use in (0.0, 1.0):
        cap.observe(EngineLoad(kv_use, running=0), 16, 9, 100.0)
        assert cap.current == 16


def test_the_cap_falls_once_and_not_while_sessions_are_still_leaving() -> None:
    cap = started(cap=40)
    cap.observe(EngineLoad(0.7, running=30, preemptions=1), 40, 3, 100.0)
    assert cap.current == 30
    cap.observe(EngineLoad(0.7, running=30, preemptions=2), 30, 3, 101.0)  # too soon
    cap.observe(EngineLoad(0.99, running=30, preemptions=9), 35, 3, 200.0)  # above the cap: they are leaving
    assert cap.current == 30
    cap.observe(EngineLoad(0.99, running=30, preemptions=9), 30, 3, 300.0)
    assert cap.current == 22


def test_the_cap_falls_from_the_live_sessions_not_from_an_unreached_cap() -> None:
    cap = started(cap=200)
    cap.observe(EngineLoad(0.95, running=30), 40, 0, 100.0)
    assert cap.current == 30


def test_preemptions_of_a_restarted_engine_are_counted_from_zero() -> None:
    cap = started()
    cap.observe(
        EngineLoad(0.6, running=5, preemptions=50), 20, 0, 100.0
    )  # more sessions than the cap: it does not fall
    cap.observe(EngineLoad(0.6, running=5, preemptions=3), 16, 0, 200.0)
    assert cap.current == 16
    cap.observe(EngineLoad(0.6, running=5, preemptions=4), 16, 0, 201.0)
    assert cap.current == 12


def test_the_load_during_a_weight_update_is_ignored() -> None:
    cap = started()
    cap.settle(100.0)
    cap.observe(EngineLoad(0.01, running=1), 16, 9, 105.0)
    assert cap.current == 16
    cap.observe(EngineLoad(0.01, running=1), 16, 9, 110.0)
    assert cap.current == 32


def test_the_cap_starts_again_when_the_engine_comes_back() -> None:
    cap = started(cap=8)
    cap.observe(EngineLoad(0.95, running=8), 8, 0, 100.0)
    assert cap.current == 6
    cap.restart()
    assert cap.current is None
    cap.observe(EngineLoad(0.0), 0, 0, 101.0)
    assert cap.current == 8


# --- a whole engine ---------------------------------------------------------------------------------------


@dataclass
class Simulated:
    """An engine with a cache of `capacity` tokens, and more rollouts than it can hold. A session's context grows until
    the session ends. All sessions always sample, so the KV use is their total context; what does not fit is
    preempted."""

    capacity: int
    cap: SessionCap = field(default_factory=lambda: SessionCap(256))
    contexts: list[int] = field(default_factory=list[int])
    born: int = 0
    preemptions: int = 0
    now_s: float = 0.0

    def look(self) -> None:
        """Simulates the time between two checks, and the check."""
        self.now_s += LOOK_S
        self.contexts = [size + 100 for size in self.contexts if size < 4000]
        allowed = 256 if self.cap.current is None else self.cap.current
        while len(self.contexts) < allowed:
            self.born += 1
            self.contexts.append(1000 + 700 * (self.born % 5))  # different sizes, so that they do not all end at once
        used_tokens = sum(self.contexts)
        self.preemptions += used_tokens > self.capacity
        load = EngineLoad(min(1.0, used_tokens / self.capacity), len(self.contexts), 0, self.preemptions)
        self.cap.observe(load, len(self.contexts), 9, self.now_s)

    def run(self, looks: int) -> list[int]:
        """Returns the live sessions at each check."""
        session_counts: list[int] = []
        for _ in range(looks):
            self.look()
            session_counts.append(len(self.contexts))
        return session_counts


def fits(capacity: int) -> float:
    """The number of sessions that fill a cache: a context has about 3,000 tokens on average."""
    return capacity / 3000


def test_the_cap_finds_a_hidden_capacity_follows_it_down_and_up_again_with_few_preemptions() -> None:
    engine = Simulated(capacity=300_000)
    engine.cap.observe(EngineLoad(0.0), 0, 0, 0.0)
    engine.run(150)
    warm = engine.preemptions
    steady = engine.run(300)
    assert 0.6 * fits(300_000) < sum(steady) / len(steady) < fits(300_000)
    assert engine.preemptions - warm <= 3  # in 300 checks

    engine.capacity = 150_000
    engine.run(150)
    before = engine.preemptions
    halved = engine.run(300)
    assert 0.6 * fits(150_000) < sum(halved) / len(halved) < fits(150_000)
    assert engine.preemptions - before <= 3

    engine.capacity = 300_000
    engine.run(150)
    again = engine.run(300)
    assert 0.6 * fits(300_000) < sum(again) / len(again) < fits(300_000)


def test_without_a_cap_the_same_engine_preempts_all_the_time() -> None:
    engine = Simulated(capacity=300_000, cap=SessionCap(256, is_fixed=True))
    engine.run(150)
    assert engine.preemptions > 100
