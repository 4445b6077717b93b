"""The service's Prometheus metrics. docs/reference/metrics.md lists them; a test keeps the two identical.

There are two kinds. *Events* (counters and histograms) are recorded where they happen, by the methods of `Metrics`.
*State* (how many are queued, in a pool, on an engine) is not recorded: it is read at each scrape, from the `Snapshot`
that a watcher returns, and so costs nothing on the hot path and can never drift.

Invariants. Each `Metrics` has its own registry; nothing is global. Labels are bounded: codes, states, stages,
installed environments, configured engines and runtimes, route templates; of names that others choose (tools, reasons of
forks) the first, and `other`. A label is never the id of a rollout, a run or
a client.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from rollyard.core import Json, LostAttempt, Rollout, Trajectory

_log = logging.getLogger("rollyard.observe")

SECONDS = (0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)
SHORT_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
COMMIT_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5, 1)
TOKENS = (0, 256, 1024, 4096, 8192, 16384, 32768, 65536, 131072)
RETRIED = ("joined", "replayed", "resumed")  # the results of a request's retry
MOST_REASONS = 16  # of forks: Rollyard's are few, but an external agent may report its own
MOST_TOOLS = 200  # Rollyard's are few, but a task's own MCP server names its tools
BATCH = (1, 2, 5, 10, 20, 50, 100, 200, 500)


@dataclass(frozen=True, slots=True)
class PoolState:
    """One stage's pool: its slots, slots in use, and rollouts that wait for a slot."""

    size: int
    active: int
    waiting: int


@dataclass(frozen=True, slots=True)
class EngineState:
    sessions: int
    in_flight: int
    is_up: bool = True
    cap: int | None = None  # of sessions; None: no limit
    kv_use: float | None = None  # None: not reported


@dataclass(frozen=True, slots=True)
class PolicyWeights:
    version: int
    is_paused: bool


@dataclass(frozen=True, slots=True)
class NodeState:
    live: int
    wants: int
    heard_s_ago: float
    is_drained: bool
    reaches: Mapping[str, bool] = field(default_factory=dict[str, bool])  # by engine


@dataclass(frozen=True, slots=True)
class Snapshot:
    """State at the time of a scrape. Each watcher fills in a part."""

    rollouts: Mapping[str, int] = field(default_factory=dict[str, int])  # by state; ended ones may be left out
    pools: Mapping[str, PoolState] = field(default_factory=dict[str, PoolState])  # by stage
    engines: Mapping[str, EngineState] = field(default_factory=dict[str, EngineState])  # by id
    seats_waiting: Mapping[str, int] = field(default_factory=dict[str, int])  # by policy
    policies: Mapping[str, PolicyWeights] = field(default_factory=dict[str, PolicyWeights])  # by name
    sandboxes: Mapping[str, int] = field(default_factory=dict[str, int])  # live, by runtime
    layer_bytes: Mapping[str, int] = field(default_factory=dict[str, int])  # by runtime
    open_breakers: Mapping[str, int] = field(default_factory=dict[str, int])  # by runtime
    waiting_for_room: Mapping[str, int] = field(default_factory=dict[str, int])  # by runtime
    nodes: Mapping[str, NodeState] = field(default_factory=dict[str, NodeState])  # by name
    unserved: Sequence[str] = ()  # policies whose rollouts wait because no node can use one of their engines


@dataclass(slots=True)
class Totals:
    """Counts since the start, for readers in this process."""

    ended: int = 0  # rollouts
    ended_turns: int = 0  # of those
    ended_tokens: int = 0
    calls: int = 0  # of engines, by this process
    sampled_tokens: int = 0  # in those


class Metrics:
    """The metrics of one service: methods that record events, and watchers that return state."""

    def __init__(self) -> None:
        self.totals = Totals()
        self.registry = CollectorRegistry()
        self._watchers: list[Callable[[], Snapshot]] = []
        self._failure_codes: dict[str, set[str]] = {}  # by engine
        self._reasons: set[str] = set()  # of forks
        self._tools: set[str] = set()
        self.registry.register(_State(self._watchers))

        def counter(name: str, help_text: str, *labels: str) -> Counter:
            return Counter(f"rollyard_{name}", help_text, labels, registry=self.registry)

        def histogram(name: str, help_text: str, buckets: Iterable[float], *labels: str) -> Histogram:
            return Histogram(f"rollyard_{name}", help_text, labels, buckets=tuple(buckets), registry=self.registry)

        ended = ("outcome", "code", "blame", "environment")
        self._ended = counter("rollouts_ended", "Rollouts that ended; code and blame are empty if completed.", *ended)
        self._ended_tokens = histogram(
            "rollout_sampled_tokens",
            "Sampled tokens of ended rollouts; blame infra over all gives the infra rate by length.",
            TOKENS,
            "blame",
        )
        self._retries = counter("rollout_retries", "Attempts that were lost and tried again, by failure code.", "code")
        self._lost_tokens = histogram(
            "lost_attempt_tokens", "Sampled tokens of lost attempts, by failure code.", TOKENS, "code"
        )
        self._stage = histogram("stage_seconds", "Working time in a stage, without queues.", SECONDS, "stage")
        self._wait = histogram("stage_wait_seconds", "Time in the queue before a stage.", SECONDS, "stage")
        self._calls = counter("engine_calls", "Model calls that an engine answered.", "engine")
        self._call_failures = counter("engine_failures", "Model calls that failed, by code.", "engine", "code")
        self._call_seconds = histogram("engine_call_seconds", "Time of a model call.", SECONDS, "engine")
        self._prompt = counter("engine_prompt_tokens", "Prompt tokens sent to an engine.", "engine")
        self._cached = counter("engine_cached_tokens", "Prompt tokens found in an engine's prefix cache.", "engine")
        self._sampled = counter("engine_sampled_tokens", "Tokens that an engine sampled.", "engine")
        self._starts = counter("sandbox_starts", "Sandboxes that were started.", "runtime")
        self._start_failures = counter("sandbox_failures", "Sandboxes that failed, by code.", "runtime", "code")
        self._start_seconds = histogram("sandbox_start_seconds", "Time to start a sandbox.", SHORT_SECONDS, "runtime")
        self._layers = counter("layers", "Set-up layers that were made, found, or failed.", "runtime", "result")
        self._tool_seconds = histogram("tool_call_seconds", "Time of a tool call.", SHORT_SECONDS, "tool")
        self._egress = counter("egress_connections", "Connections that sandboxes requested, by verdict.", "verdict")
        self._egress_bytes = counter("egress_bytes", "Bytes that sandboxes sent and received.", "direction")
        self._forks = counter("forks", "Traces that do not continue an earlier one, by reason.", "reason")
        self._gateway = counter("gateway_requests", "Requests of agent programs, by result.", "result")
        self._abandoned = counter("gateway_abandoned", "Completions that no agent program received.")
        self._commit = histogram("store_commit_seconds", "Time of a commit, including its statements.", COMMIT_SECONDS)
        self._batch = histogram("store_commit_operations", "Operations in one commit.", BATCH)
        self._http = counter("http_requests", "HTTP requests, by route template.", "method", "route", "status")
        self._http_refused = counter(
            "http_refusals", "Requests and connections refused before authentication, by reason.", "reason"
        )
        self._http_seconds = histogram(
            "http_request_seconds", "Time to answer, including long polls.", SHORT_SECONDS, "method", "route"
        )

    # --- state ----------------------------------------------------------------------------------------

    def watch(self, watcher: Callable[[], Snapshot]) -> None:
        """Calls `watcher` for a snapshot at each scrape. It must be quick and must not block."""
        self._watchers.append(watcher)

    # --- events ---------------------------------------------------------------------------------------

    def rollout_ended(self, rollout: Rollout) -> None:
        """Counts a terminal record and records the times of its stages."""
        ending = rollout.ending
        if ending is None:
            raise ValueError(f"rollout {rollout.id} has not ended")
        failure = ending.failure
        code, blame = (failure.code, failure.blame.value) if failure else ("", "")
        self._ended.labels(ending.outcome.value, code, blame, rollout.task.environment).inc()
        self._ended_tokens.labels(blame).observe(ending.summary.sampled_tokens)
        self.totals.ended += 1
        self.totals.ended_turns += ending.summary.turns
        self.totals.ended_tokens += ending.summary.sampled_tokens
        timings = ending.timings
        for stage, work_s, wait_s in (
            ("init", timings.init_s, timings.queued_s),
            ("run", timings.run_s, timings.ready_s),
            ("eval", timings.eval_s, timings.eval_wait_s),
        ):
            if work_s or wait_s:  # a stage that was not reached is not a stage of 0 s
                self._stage.labels(stage).observe(work_s)
                self._wait.labels(stage).observe(wait_s)

    def attempt_lost(self, lost: LostAttempt) -> None:
        self._retries.labels(lost.code).inc()
        self._lost_tokens.labels(lost.code).observe(lost.tokens_lost)

    def engine_call(
        self, engine: str, seconds: float, *, prompt_tokens: int, sampled_tokens: int, cached_tokens: int | None
    ) -> None:
        self._calls.labels(engine).inc()
        self.totals.calls += 1
        self.totals.sampled_tokens += sampled_tokens
        self._call_seconds.labels(engine).observe(seconds)
        self._prompt.labels(engine).inc(prompt_tokens)
        self._sampled.labels(engine).inc(sampled_tokens)
        if cached_tokens is not None:
            self._cached.labels(engine).inc(cached_tokens)

    def engine_failed(self, engine: str, code: str) -> None:
        self._call_failures.labels(engine, code).inc()
        self._failure_codes.setdefault(engine, set()).add(code)

    def engine_removed(self, engine: str) -> None:
        """Deletes an engine's series, so that series of removed engines do not accumulate."""
        for metric in (self._calls, self._call_seconds, self._prompt, self._cached, self._sampled):
            with suppress(KeyError):  # it has no such series
                metric.remove(engine)
        for code in self._failure_codes.pop(engine, ()):
            self._call_failures.remove(engine, code)

    def sandbox_started(self, runtime: str, seconds: float) -> None:
        self._starts.labels(runtime).inc()
        self._start_seconds.labels(runtime).observe(seconds)

    def sandbox_failed(self, runtime: str, code: str) -> None:
        self._start_failures.labels(runtime, code).inc()

    def layer_used(self, runtime: str, result: str) -> None:
        """Counts a set-up layer that was made, found, or failed."""
        self._layers.labels(runtime, result).inc()

    def tool_call(self, tool: str, seconds: float) -> None:
        if len(self._tools) < MOST_TOOLS:
            self._tools.add(tool)
        self._tool_seconds.labels(tool if tool in self._tools else "other").observe(seconds)

    def run_ended(self, trajectory: Trajectory) -> None:
        """Counts forks, for every agent; and retries and abandoned completions, for agents with a gateway."""
        for trace in trajectory.traces:
            if trace.fork_reason is not None:
                self._forks.labels(self._reason(trace.fork_reason)).inc()
        gateway = trajectory.info.get("gateway")
        if not isinstance(gateway, Mapping):
            return
        counts = {name: _count(gateway.get(name)) for name in (*RETRIED, "refused")}
        counts["new"] = max(0, _count(gateway.get("requests")) - sum(counts.values()))
        for result, count in counts.items():
            self._gateway.labels(result).inc(count)
        self._abandoned.inc(_count(gateway.get("abandoned")))

    def _reason(self, reason: str) -> str:
        if len(self._reasons) < MOST_REASONS:
            self._reasons.add(reason)
        return reason if reason in self._reasons else "other"

    def store_commit(self, seconds: float, operations: int) -> None:
        """For `SqliteStore.open(on_commit=…)`."""
        self._commit.observe(seconds)
        self._batch.observe(operations)

    def egress_used(self, verdicts: Mapping[str, int], sent_bytes: int, received_bytes: int) -> None:
        """Counts the connections of an attempt's sandboxes. There is a fixed set of verdicts."""
        for verdict, count in verdicts.items():
            self._egress.labels(verdict).inc(count)
        if verdicts:
            self._egress_bytes.labels("sent").inc(sent_bytes)
            self._egress_bytes.labels("received").inc(received_bytes)

    def http_request(self, method: str, route: str, status: int, seconds: float) -> None:
        self._http.labels(method, route, str(status)).inc()
        self._http_seconds.labels(method, route).observe(seconds)

    def http_refused(self, reason: str) -> None:
        """Counts a refusal of the HTTP server itself; `reason` is a `rollyard.http.Reason`."""
        self._http_refused.labels(reason).inc()

    # --- out ------------------------------------------------------------------------------------------

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """Returns the text of a scrape and its content type: OpenMetrics if the scraper accepts it."""
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type

    def describe(self) -> Iterator[tuple[str, str, tuple[str, ...], str]]:
        """Yields (name as scraped, type, labels, meaning) of every metric, ordered by name."""
        rows: list[tuple[str, str, tuple[str, ...], str]] = []
        for metric in (value for value in vars(self).values() if isinstance(value, Counter | Histogram)):
            (family,) = metric.describe()
            name = family.name + ("_total" if family.type == "counter" else "")
            rows.append((name, family.type, tuple(metric._labelnames), family.documentation))
        rows += [(name, "gauge", tuple(labels.split()), meaning) for name, labels, meaning in _GAUGES.values()]
        yield from sorted(rows)


def _count(value: Json) -> int:
    return value if isinstance(value, int) else 0


_GAUGES = {
    "rollouts": ("rollyard_rollouts", "state", "Rollouts that have not ended, by state."),
    "pool_size": ("rollyard_pool_size", "stage", "Slots of a stage's pool."),
    "pool_active": ("rollyard_pool_active", "stage", "Slots in use."),
    "pool_waiting": ("rollyard_pool_waiting", "stage", "Rollouts that wait for a slot."),
    "engine_sessions": ("rollyard_engine_sessions", "engine", "Sessions on an engine."),
    "engine_in_flight": ("rollyard_engine_in_flight", "engine", "Model calls in progress."),
    "engine_up": ("rollyard_engine_up", "engine", "1 if it accepts calls, 0 if it is unhealthy or quarantined."),
    "engine_session_cap": ("rollyard_engine_session_cap", "engine", "Limit of its sessions; absent if unlimited."),
    "engine_kv_use": ("rollyard_engine_kv_use", "engine", "Used share of its KV cache, 0 to 1, if reported."),
    "seats_waiting": ("rollyard_seats_waiting", "policy", "Rollouts in READY that wait for a seat at its engines."),
    "policy_version": ("rollyard_policy_version", "policy", "The weight version at the last resume."),
    "policy_paused": (
        "rollyard_policy_paused",
        "policy",
        "1 while it is paused, also by a change that was not completed.",
    ),
    "sandboxes": ("rollyard_sandboxes", "runtime", "Live sandboxes."),
    "layer_bytes": ("rollyard_layer_bytes", "runtime", "Disk space of stored set-up layers."),
    "open_breakers": ("rollyard_open_breakers", "runtime", "Images (or no image) whose starts are refused."),
    "waiting_for_room": (
        "rollyard_waiting_for_room",
        "runtime",
        "Sandboxes that wait to start because the machine is short of memory or disk.",
    ),
    "node_live": ("rollyard_node_live", "node", "Rollouts leased to it."),
    "node_wants": ("rollyard_node_wants", "node", "Rollouts that it could take now."),
    "node_heard": ("rollyard_node_heard_seconds_ago", "node", "Time since its last call."),
    "node_drained": ("rollyard_node_drained", "node", "1 while it accepts no more rollouts."),
    "node_engine_reachable": (
        "rollyard_node_engine_reachable",
        "node engine",
        "1 while the node can use the engine; 0: it gets no rollouts for it.",
    ),
    "policy_unserved": (
        "rollyard_policy_unserved",
        "policy",
        "1 while its rollouts wait because no engine, or no node, can serve it.",
    ),
}


class _State(Collector):
    """The gauges, created from snapshots at each scrape."""

    def __init__(self, watchers: list[Callable[[], Snapshot]]) -> None:
        self._watchers = watchers

    def describe(self) -> Iterable[Metric]:  # so that registering it does not collect
        return [GaugeMetricFamily(name, meaning, labels=labels.split()) for name, labels, meaning in _GAUGES.values()]

    def collect(self) -> Iterable[Metric]:
        families = {
            key: GaugeMetricFamily(name, meaning, labels=labels.split())
            for key, (name, labels, meaning) in _GAUGES.items()
        }
        for watcher in self._watchers:
            try:
                snapshot = watcher()
            except Exception:  # the other metrics matter most when something is wrong
                _log.exception("a watcher failed; its gauges are missing from this scrape")
                continue
            for state, count in snapshot.rollouts.items():
                families["rollouts"].add_metric([state], count)
            for stage, pool in snapshot.pools.items():
                families["pool_size"].add_metric([stage], pool.size)
                families["pool_active"].add_metric([stage], pool.active)
                families["pool_waiting"].add_metric([stage], pool.waiting)
            for engine, load in snapshot.engines.items():
                families["engine_sessions"].add_metric([engine], load.sessions)
                families["engine_in_flight"].add_metric([engine], load.in_flight)
                families["engine_up"].add_metric([engine], load.is_up)
                if load.cap is not None:
                    families["engine_session_cap"].add_metric([engine], load.cap)
                if load.kv_use is not None:
                    families["engine_kv_use"].add_metric([engine], load.kv_use)
            for policy, count in snapshot.seats_waiting.items():
                families["seats_waiting"].add_metric([policy], count)
            for policy, weights in snapshot.policies.items():
                families["policy_version"].add_metric([policy], weights.version)
                families["policy_paused"].add_metric([policy], weights.is_paused)
            for runtime, live in snapshot.sandboxes.items():
                families["sandboxes"].add_metric([runtime], live)
            for runtime, size_bytes in snapshot.layer_bytes.items():
                families["layer_bytes"].add_metric([runtime], size_bytes)
            for runtime, count in snapshot.open_breakers.items():
                families["open_breakers"].add_metric([runtime], count)
            for runtime, count in snapshot.waiting_for_room.items():
                families["waiting_for_room"].add_metric([runtime], count)
            for name, node in snapshot.nodes.items():
                families["node_live"].add_metric([name], node.live)
                families["node_wants"].add_metric([name], node.wants)
                families["node_heard"].add_metric([name], node.heard_s_ago)
                families["node_drained"].add_metric([name], node.is_drained)
                for engine, is_reachable in node.reaches.items():
                    families["node_engine_reachable"].add_metric([name, engine], is_reachable)
            for policy in snapshot.unserved:
                families["policy_unserved"].add_metric([policy], 1)
        return families.values()
