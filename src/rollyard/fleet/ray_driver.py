"""The Ray driver: a child process of the head that keeps one node on every machine of a Ray cluster.

It is a process of its own, because Ray ends the process that is connected to it when its GCS (the head of the *Ray*
cluster) has been unreachable for 60 s. That must not be the service. Ray also handles SIGTERM itself, prints on stdout,
and blocks in most of its calls; in this process, that does no harm. The head sends the configuration in the first line
on the driver's standard input, and receives the nodes' status in a line every STATUS_EVERY_S.

Facts about Ray that this relies on (tested with 2.60):
- A driver needs a Ray node on its own machine. RAY_AUTH_MODE=token, with RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH, must
  be in the environment of `ray start` on every machine and of the driver, before `import ray`. An address given by hand
  never turns it on by itself. Without the token, or with another, `ray start` and a driver are refused, after 20 s of
  trying. A driver with a token on a cluster that has none connects, and its actors never start.
- An actor that is detached and named outlives its driver; the next driver with the same namespace gets it by its name.
- An actor bound to a Ray node by a hard affinity is restarted there, and fails as unschedulable when that node is gone,
  which Ray notices after some 10 s when the node was killed.
- A new cluster of `ray.init(_node_ip_address="127.0.0.1")` listens on 127.0.0.1 only, and ends with its driver, however
  that one ends (Ray has a reaper).
- Workers inherit the environment of their raylet, not of the driver.
- When the GCS has been gone for 60 s, all raylets end, and the nodes on them.
- One more Ray node costs 1 s, and 190 MiB: 105 for Ray's two agents, 10 for the raylet, 75 for an actor without a
  pipeline.

Invariants. Each actor has at most one unanswered call. When the parent is gone, this process ends at once; actors stay.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from rollyard.fleet.ray_actor import NodeActor, NodeState
from rollyard.fleet.ray_messages import DriverConfig, DriverOrder, DriverReport, RayNode

STATUS_EVERY_S = 2.0
ASK_S = 1.0
"""Seconds for which a status waits for the answers of actors; a later status has the slower answers."""

SILENT_S = 15.0
"""An actor that has not answered for so long does not count as alive. A start takes 1 to 2 s."""

MAKE_EVERY_S = 10.0
"""Seconds before an actor that cannot be created (rollyard is not installed there) is tried again."""

OBJECT_STORE_BYTES = 80 << 20
"""For a cluster that the driver starts: Rollyard does not use it, and Ray takes no less than 75 MB."""


@dataclass(slots=True)
class _ActorRecord:
    """The driver's record of an actor."""

    name: str
    host: str
    actor: Any = None
    question: Any = None  # the call that is not answered yet
    answered_at_s: float = field(default_factory=time.monotonic)
    created_at_s: float = float("-inf")
    is_running: bool = False
    error: str = ""


class Driver:
    """Keeps one node on every machine. All its methods block; it has this process for itself."""

    def __init__(self, brief: DriverConfig) -> None:
        self._brief = brief
        self._records: dict[str, _ActorRecord] = {}
        self._is_superseded = False

    def connect(self) -> None:
        import ray

        common: dict[str, Any] = {
            "namespace": self._brief.namespace,
            "log_to_driver": False,
            "configure_logging": False,
        }
        if self._brief.address is None:
            ray.init(
                "local",
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                _node_ip_address="127.0.0.1",
                **common,
            )
        else:
            ray.init(self._brief.address, **common)

    def close(self) -> None:
        import ray

        ray.shutdown()

    def status(self) -> DriverReport:
        """Creates missing actors, calls all of them, and returns their status."""
        import ray

        if self._is_superseded:
            return self._superseded()
        alive = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
        for ray_id in self._records.keys() - alive.keys():
            del self._records[ray_id]  # Ray ends its actor, which may run nowhere else
        for ray_id, node in alive.items():
            host = str(node["NodeManagerHostname"])
            record = self._records.setdefault(ray_id, _ActorRecord(name=f"{host}-{ray_id[:8]}", host=host))
            resources: Mapping[str, float] = node["Resources"]
            if not resources.get("CPU"):
                record.error = "this Ray node offers no CPU: it gets no rollouts"
            elif record.actor is None and time.monotonic() - record.created_at_s >= MAKE_EVERY_S:
                self._make(ray_id, record, resources)
        self._ask()
        if self._is_superseded:
            return self._superseded()
        return DriverReport("status", tuple(self._node(ray_id, record) for ray_id, record in self._records.items()))

    def stop_nodes(self, bound_s: float) -> DriverReport:
        """Requests all nodes to end what they have, then ends their actors for good. Reports late ones."""
        import ray
        from ray.exceptions import RayError

        records = [one for one in self._records.values() if one.actor is not None]
        answers = [one.actor.stop.remote(bound_s) for one in records]
        ready: list[Any] = []
        if answers:
            ready, _ = ray.wait(answers, num_returns=len(answers), timeout=bound_s)
        late: list[str] = []
        for one, answer in zip(records, answers, strict=True):
            try:
                has_ended = answer in ready and ray.get(answer)
            except RayError:
                has_ended = True  # its process is gone
            if not has_ended:
                late.append(one.name)
            ray.kill(one.actor, no_restart=True)
        self._records.clear()
        return DriverReport("stopped", error=f"ended by force: {', '.join(late)}" if late else "")

    def _make(self, ray_id: str, record: _ActorRecord, resources: Mapping[str, float]) -> None:
        import ray
        from ray.exceptions import RayError
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        record.created_at_s = record.answered_at_s = time.monotonic()
        options = {
            "name": f"node-{ray_id}",
            "lifetime": "detached",
            "get_if_exists": True,  # an earlier head's actor continues with all that it has
            "max_restarts": -1,
            "max_concurrency": 4,  # a node that is being stopped still answers
            "num_cpus": 0,  # the machine's CPUs are for sandboxes, which Ray does not count
            "scheduling_strategy": NodeAffinitySchedulingStrategy(ray_id, soft=False),
        }
        brief = self._brief
        try:
            actor = ray.remote(NodeActor).options(**options)
            record.actor = actor.remote(
                record.name, brief.entry, dict(brief.settings), resources["CPU"], resources.get("memory", 0.0)
            )
        except (RayError, ValueError) as error:
            record.error = _first_line(error)

    def _ask(self) -> None:
        import ray
        from ray.exceptions import ActorDiedError, ActorUnschedulableError, RayError

        brief = self._brief
        for record in self._records.values():
            if record.actor is not None and record.question is None:
                record.question = record.actor.meet.remote(brief.head_id, brief.head_url, brief.token)
        open_ = [record for record in self._records.values() if record.question is not None]
        if not open_:
            return
        ready, _ = ray.wait([record.question for record in open_], num_returns=len(open_), timeout=ASK_S)
        answered = set(ready)
        for record in open_:
            if record.question not in answered:
                continue
            question, record.question = record.question, None
            try:
                state: NodeState = ray.get(question)
            except (ActorDiedError, ActorUnschedulableError) as error:
                record.actor, record.is_running, record.error = None, False, _first_line(error)
            except RayError as error:  # it is being restarted
                record.is_running, record.error = False, _first_line(error)
            else:
                record.answered_at_s = time.monotonic()
                record.is_running, record.error = state.is_running, state.error
                self._is_superseded |= not state.is_ours

    def _node(self, ray_id: str, record: _ActorRecord) -> RayNode:
        silent_s = time.monotonic() - record.answered_at_s
        is_silent = record.actor is not None and silent_s > SILENT_S
        error = record.error or (f"it has not answered for {silent_s:.0f} s" if is_silent else "")
        return RayNode(record.name, ray_id, record.host, record.is_running and not is_silent, error)

    def _superseded(self) -> DriverReport:
        self._records.clear()  # this driver must not stop them, either
        return DriverReport("superseded", error="another head has taken over the nodes of this Ray cluster")


def main() -> None:
    # Ray's children inherit standard input and would keep the connection open after this process has ended.
    connection = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    stream = connection.makefile("wb")

    def send(report: DriverReport) -> None:
        stream.write(msgspec.json.encode(report) + b"\n")
        stream.flush()

    orders: queue.SimpleQueue[DriverOrder] = queue.SimpleQueue()

    def listen(lines: Any) -> None:
        for line in lines:
            orders.put(msgspec.json.decode(line, type=DriverOrder))
        os._exit(0)  # the head is gone, and a blocked call of Ray may take a minute

    reader = connection.makefile("rb")
    driver = Driver(msgspec.json.decode(reader.readline(), type=DriverConfig))
    threading.Thread(target=listen, args=(reader,), daemon=True).start()
    try:
        driver.connect()
    except Exception as error:
        send(DriverReport("failed", error=_why(error)))
        return
    while True:
        send(driver.status())
        try:
            order = orders.get(timeout=STATUS_EVERY_S)
        except queue.Empty:
            continue
        if order.what == "stop_nodes":
            send(driver.stop_nodes(order.bound_s))
            order = orders.get()  # no more statuses: reading one would start the nodes again
        if order.what == "close":
            driver.close()
            return


def _why(error: BaseException) -> str:
    """Returns why a connection failed, in one line. An authentication error is at the end of a long chain of causes."""
    from ray.exceptions import AuthenticationError

    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, AuthenticationError) or "AuthenticationError" in str(cause):
            return (
                "Ray refused this process's token: set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH "
                "as they were when the cluster was started"
            )
        cause = cause.__cause__
    return f"{type(error).__name__}: {_first_line(error)}"


def _first_line(error: BaseException) -> str:
    """Returns the first and last line of an error: Ray's errors are pages long."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first = lines[0] if lines else type(error).__name__
    last = lines[-1] if len(lines) > 1 else ""
    return (f"{first} … {last}" if last else first)[:500]


if __name__ == "__main__":
    main()
