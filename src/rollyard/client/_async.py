"""The asynchronous client, with one method per call of the API.

Ids are generated here if the caller passes none, so a call that was interrupted can be sent again and is still one
rollout. The client keeps no state: a restarted trainer continues with its ids and its cursor.

    async with rollyard.AsyncClient() as client:
        records = await client.submit(tasks, run="grpo-7b", group_size=8)
        for record in await client.wait_all([record.id for record in records]):
            traces = await client.traces(record.id)

`Client` has the same methods without `await`; a test checks that they match.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from types import TracebackType
from urllib.parse import quote

import msgspec

from rollyard.client._access import AsyncAccess
from rollyard.client._bodies import TaskLike, encoded, in_calls, part, task_body, without_none
from rollyard.client._discovery import find
from rollyard.client._events import follow
from rollyard.client._policies import AsyncPolicy, Holder
from rollyard.client._sampling import AsyncSampling
from rollyard.client._sessions import AsyncSession
from rollyard.client._transport import ARROW, Transport
from rollyard.client._waiting import POLL_S, wait_all
from rollyard.client.records import (
    Event,
    JsonObject,
    Page,
    Record,
    TaskCheck,
    Trace,
    Trajectory,
    read,
    read_object,
    read_page,
)
from rollyard.client.traces import read_trajectory
from rollyard.core import Json, RollyardError, check_id, new_id
from rollyard.core.failure import NotFound

# `AsyncClient.list` hides the builtin in the class below, so lists are named here.
Records = list[Record]
Objects = list[JsonObject]
Traces = list[Trace]
TokenTexts = list[list[str] | None]
Raws = list[msgspec.Raw]


class AsyncClient(AsyncSampling, AsyncAccess):
    """The asynchronous client.

    `url` and `token` default to ROLLYARD_URL and ROLLYARD_TOKEN, then to the settings on this machine. `timeout_s`
    bounds the time without data in one call; `retry_s` bounds the time for which a failed call is retried.
    """

    def __init__(
        self, url: str | None = None, token: str | None = None, *, timeout_s: float = 30.0, retry_s: float = 60.0
    ) -> None:
        self._wire = Transport(find(url, token), timeout_s, retry_s)
        self._holder = Holder()

    @property
    def url(self) -> str:
        return self._wire.place.url

    async def __aenter__(self) -> AsyncClient:
        await self._wire.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._wire.__aexit__(kind, error, trace)

    # --- runs -----------------------------------------------------------------------------------------

    async def create_run(
        self,
        id: str | None = None,
        *,
        mode: str | None = None,
        policy: str | None = None,
        defaults: Mapping[str, Json] | None = None,
        seed: int | None = None,
        priority: int | None = None,
        max_live: int | None = None,
        max_queued: int | None = None,
        trainable_on_deadline: bool | None = None,
        mask_truncated: bool | None = None,
        overlong_penalty: Mapping[str, Json] | None = None,
    ) -> JsonObject:
        """Creates a run, or returns it if it exists with the same body. `defaults` is a partial task, used as defaults
        for each task.

        `mask_truncated` excludes truncated rollouts from the loss; `overlong_penalty` is
        `{"from_tokens", "to_tokens", "most"?}`."""
        body = without_none(
            id=check_id(id) if id else new_id("run"),
            mode=mode,
            policy=policy,
            defaults=defaults,
            seed=seed,
            priority=priority,
            max_live=max_live,
            max_queued=max_queued,
            trainable_on_deadline=trainable_on_deadline,
            mask_truncated=mask_truncated,
            overlong_penalty=overlong_penalty,
        )
        return read_object(await self._wire.json("POST", "/runs", body=body, is_repeatable=True))

    async def get_run(self, id: str, *, results: bool = False) -> JsonObject:
        """The run; with `results`, also its rollouts in numbers: states, mean reward, trainable ones."""
        return read_object(await self._wire.json("GET", f"/runs/{part(id)}", params=_include_results(results)))

    async def list_runs(self, *, results: bool = False) -> Objects:
        """All runs in order of creation; `results` as in `get_run`."""
        return _items(await self._wire.json("GET", "/runs", params=_include_results(results)), "runs")

    async def delete_run(self, id: str) -> None:
        """Cancels the run's unfinished work and deletes it with all its rollouts. Returns when it is deleted."""
        path = f"/runs/{part(id)}"
        is_deleted = await self._wire.json("DELETE", path, wait_s=POLL_S) is None
        pause_s = 0.05
        while not is_deleted:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, 2.0)
            try:
                await self._wire.json("GET", path)
            except NotFound:
                is_deleted = True

    async def acknowledge(self, run: str, cursor: str) -> int:
        """Acknowledges everything up to that cursor, so that its traces may be deleted. Returns how many were."""
        body = await self._wire.json("POST", f"/runs/{part(run)}/ack", body={"cursor": cursor}, is_repeatable=True)
        return int(read_object(body).get("acknowledged", 0))

    # --- rollouts -------------------------------------------------------------------------------------

    async def submit(
        self,
        tasks: Sequence[TaskLike],
        *,
        run: str = "default",
        ids: Sequence[str] | None = None,
        group_size: int | None = None,
        priority: int | None = None,
    ) -> Records:
        """Submits tasks and returns their records, in order. They are durable when it returns.

        With `group_size` n, each task is a group of n rollouts, `ID-0` to `ID-(n-1)`, and `ids` are those of the
        groups. Many or large rollouts take several calls; if one is refused, the earlier ones stay
        (`error.data["submitted"]` is their number). Repeating with the same ids adds only what is missing.
        """
        if ids is not None and len(ids) != len(tasks):
            raise ValueError(f"{len(tasks)} tasks and {len(ids)} ids: there must be one id for each task")
        if group_size is not None and group_size < 1:
            raise ValueError(f"a group has 1 rollout or more, not {group_size}")
        names = list(ids) if ids is not None else [new_id("g" if group_size else "r") for _ in tasks]
        rollouts: Raws = []
        for name, task in zip(names, tasks, strict=True):
            item = without_none(id=check_id(name), task=encoded(task_body(task)), priority=priority)
            if group_size is None:
                rollouts.append(encoded(item))
            else:
                members = ({"id": f"{name}-{k}", "group": name, "index": k} for k in range(group_size))
                rollouts += [encoded({**item, **member}) for member in members]
        records: Records = []
        for start, rollouts_of_call in in_calls(rollouts):
            call = {"run": run, "rollouts": rollouts_of_call}
            try:
                reply = await self._wire.json("POST", "/rollouts", body=call, is_repeatable=True)
            except RollyardError as error:
                error.data["submitted"] = start  # paths in the error are relative to this number
                raise
            records += read_page(reply).rollouts
        return records

    async def check(self, tasks: Sequence[TaskLike], *, run: str = "default") -> TaskCheck:
        """Checks tasks as `submit` does, and submits nothing. Returns how many would be refused, and why."""
        total = TaskCheck()
        for start, tasks_of_call in in_calls([encoded(task_body(task)) for task in tasks]):
            call = {"run": run, "tasks": tasks_of_call}
            found = read(await self._wire.json("POST", "/tasks/check", body=call, is_repeatable=True), TaskCheck)
            total = total.plus(found, start)
        return total

    async def get(self, id: str, *, wait_s: float = 0.0, run: str | None = None) -> Record:
        """The current record; with `wait_s`, the record at its end or after that time.

        `run`, here and below: the run of the rollout. It is only needed if two of your runs use the same id.
        """
        params = {"wait_s": wait_s or None, "run": run}
        return read(await self._wire.json("GET", f"/rollouts/{part(id)}", params=params, wait_s=wait_s), Record)

    async def wait(self, id: str, *, timeout_s: float | None = None, run: str | None = None) -> Record:
        """The record at its end. Raises TimeoutError if it has not ended after `timeout_s`; the rollout continues."""
        give_up = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            poll_s = POLL_S if give_up is None else min(POLL_S, max(0.0, give_up - time.monotonic()))
            record = await self.get(id, wait_s=poll_s, run=run)
            if record.is_ended:
                return record
            if give_up is not None and time.monotonic() >= give_up:
                raise TimeoutError(f"rollout {id} is in {record.state} after {timeout_s:g} s")

    async def wait_all(
        self,
        ids: Iterable[str],
        *,
        on_end: Callable[[Record], object] | None = None,
        on_event: Callable[[Event], object] | None = None,
        timeout_s: float | None = None,
        run: str | None = None,
        after: str | None = None,
    ) -> Records:
        """All records at their ends, in the order of the ids; `on_end` is called once for each, as it ends.

        `on_event` is called for their changes of state, as far as the service reports them: from now on, or after the
        event with the id `after` (`last_event` of `status`). TimeoutError as in `wait`.
        """
        return await wait_all(self, [*ids], on_end, on_event, timeout_s, run, after)

    async def list(
        self,
        *,
        state: str | None = None,
        run: str | None = None,
        group: str | None = None,
        after: str | None = None,
        limit: int | None = None,
        order: str | None = None,
        wait_s: float = 0.0,
    ) -> Page:
        """One page: ended rollouts in terminal order, others in order of submission; with order "newest", reversed."""
        params = {"state": state, "run": run, "group": group, "after": after, "limit": limit}
        params |= {"order": order, "wait_s": wait_s or None}
        return read_page(await self._wire.json("GET", "/rollouts", params=params, wait_s=wait_s))

    async def ended(
        self, run: str | None = None, *, after: str | None = None, follow: bool = False
    ) -> AsyncIterator[Record]:
        """Every rollout that ended after that cursor, then each as it ends, in terminal order. Stops when no rollout of
        the run (None: of all your runs) is unfinished; with `follow`, never: it then waits for further submissions."""
        wait_s = 0.0
        while True:
            page = await self.list(state="ended", run=run, after=after, wait_s=wait_s)
            for record in page.rollouts:
                yield record
            after = page.next or after
            if not page.rollouts and page.unfinished is False and not follow:
                return
            # Without an unfinished one: asked again at once, since the caller may have submitted more.
            wait_s = POLL_S if follow or page.unfinished is not False else 0.0

    async def cancel(self, id: str, *, run: str | None = None) -> str:
        """Cancels a rollout and returns its state. An unknown id is cancelled when it is submitted to that run, or to
        the default run."""
        body = await self._wire.json("DELETE", f"/rollouts/{part(id)}", params={"run": run})
        return str(read_object(body).get("state", ""))

    async def rescore(self, id: str, *, run: str | None = None) -> Record:
        """Scores the saved artifacts again; the new score is the last of `scores`."""
        reply = await self._wire.json("POST", f"/rollouts/{part(id)}/rescore", params={"run": run}, wait_s=3600.0)
        return read(reply, Record)

    async def find_ids(self, kind: str, prefix: str, *, run: str | None = None) -> Objects:
        """The items with that id, or else those whose ids start with it, each as `{"id", "run"}`: at most 20. `kind` is
        rollout, group, draw, eval or run."""
        params = {"kind": kind, "prefix": prefix, "run": run}
        return _items(await self._wire.json("GET", "/ids", params=params), "ids")

    # --- agents that run elsewhere --------------------------------------------------------------------

    def session(
        self,
        id: str | None = None,
        *,
        run: str = "default",
        sampling: Mapping[str, Json] | None = None,
        limits: Mapping[str, Json] | None = None,
        reasoning_history: str | None = None,
        strict: bool | None = None,
        structured_output: bool | None = None,
        metadata: Mapping[str, Json] | None = None,
        priority: int | None = None,
        group: str | None = None,
        index: int | None = None,
        timeout_s: float | None = None,
    ) -> AsyncSession:
        """A session for an agent that runs in your own process: use it in `async with`, and end it with a reward.

        `limits.run_s` counts from its opening to its reward. `group` and `index` make it a member of a group.
        `timeout_s` bounds the wait until it is open.
        """
        body = without_none(
            id=check_id(id) if id else new_id("se"),
            run=run,
            sampling=sampling,
            limits=limits,
            reasoning_history=reasoning_history,
            strict=strict,
            structured_output=structured_output,
            metadata=metadata,
            priority=priority,
            group=group,
            index=index,
        )
        return AsyncSession(self._wire, body, timeout_s)

    # --- results --------------------------------------------------------------------------------------

    async def traces(self, id: str, *, run: str | None = None) -> Traces:
        """The traces, as numpy views."""
        from rollyard.client.arrow import read_traces

        return read_traces(await self.traces_arrow(id, run=run))

    async def traces_arrow(self, id: str, *, run: str | None = None) -> bytes:
        """The traces as the Arrow IPC stream of the response, for files and for other readers."""
        data, _ = await self._wire.call("GET", f"/rollouts/{part(id)}/traces", params={"run": run}, accept=ARROW)
        return data

    async def trajectory(self, id: str, *, run: str | None = None) -> Trajectory:
        """The record, messages and traces."""
        params = {"include": "trajectory", "run": run}
        return read_trajectory(await self._wire.json("GET", f"/rollouts/{part(id)}", params=params))

    async def messages(self, id: str, *, after: int = 0, run: str | None = None) -> JsonObject:
        """The conversation so far, also while the rollout runs: `messages` from number `after` on, `next`, `turns`,
        `sampled_tokens`, `state` and `attempt`. A new attempt starts a new conversation; with another
        `conversation`, the messages do not continue those of earlier replies."""
        params = {"after": after, "run": run}
        return read_object(await self._wire.json("GET", f"/rollouts/{part(id)}/messages", params=params))

    async def token_texts(self, id: str, *, run: str | None = None) -> TokenTexts:
        """The text of each token, one list per trace; None for a trace whose model no engine serves now."""
        body = await self._wire.json("GET", f"/rollouts/{part(id)}/texts", params={"run": run})
        return read_object(body).get("texts") or []

    async def timeline(self, id: str, *, run: str | None = None) -> JsonObject:
        """When each stage, model call and tool call of each attempt started and ended, also while the rollout runs:
        `attempts` with `parts`, in seconds since `origin`."""
        return read_object(await self._wire.json("GET", f"/rollouts/{part(id)}/timeline", params={"run": run}))

    async def requests(self, id: str, *, run: str | None = None) -> JsonObject:
        """The requests of an agent program as it sent them, each as the difference to the one that it extends."""
        return read_object(await self._wire.json("GET", f"/rollouts/{part(id)}/requests", params={"run": run}))

    async def artifacts(self, id: str, *, run: str | None = None) -> list[JsonObject]:
        """The files that RUN left for EVAL: `name`, `path`, `bytes`, `kind` and `available` of each."""
        body = await self._wire.json("GET", f"/rollouts/{part(id)}/artifacts", params={"run": run})
        return read_object(body).get("artifacts") or []

    async def artifact(self, id: str, name: str, *, run: str | None = None) -> bytes:
        """The bytes of an artifact: of a file, or of a tar archive of a folder."""
        path = f"/rollouts/{part(id)}/artifacts/{quote(name, safe='')}"
        data, _ = await self._wire.call("GET", path, params={"run": run}, accept="application/octet-stream")
        return data

    # --- engines --------------------------------------------------------------------------------------

    async def add_engine(
        self,
        url: str,
        *,
        id: str | None = None,
        kind: str | None = None,
        policy: str | None = None,
        model: str | None = None,
        role: str | None = None,
        tokenizer: str | None = None,
        renderer: str | None = None,
        capacity: int | None = None,
        admission: str | None = None,
        api_key: str | None = None,
        trust_tokenizer: bool | None = None,
    ) -> JsonObject:
        """Adds an engine. The service probes it first; an error of the probe is raised here. `trust_tokenizer`: train
        on its tokens even if its tokenizer cannot be verified."""
        body = without_none(
            id=id,
            url=url,
            kind=kind,
            policy=policy,
            model=model,
            role=role,
            tokenizer=tokenizer,
            renderer=renderer,
            capacity=capacity,
            admission=admission,
            api_key=api_key,
            trust_tokenizer=trust_tokenizer,
        )
        return read_object(await self._wire.json("POST", "/engines", body=body, wait_s=POLL_S))

    async def engines(self) -> Objects:
        return _items(await self._wire.json("GET", "/engines"), "engines")

    async def remove_engine(self, id: str) -> None:
        await self._wire.json("DELETE", f"/engines/{part(id)}")

    async def clear_engines(self) -> None:
        await self._wire.json("DELETE", "/engines")

    # --- weights --------------------------------------------------------------------------------------

    def policy(self, name: str = "default", *, holder: str | None = None) -> AsyncPolicy:
        """Named weights: pauses and resumes them, or does both around an update. `holder`: a name that several
        processes of one trainer share; by default each client has its own."""
        return AsyncPolicy(self._wire, name, self._holder if holder is None else Holder(holder, self._holder.named))

    async def policies(self) -> Objects:
        return _items(await self._wire.json("GET", "/policies"), "policies")

    # --- nodes of a fleet -----------------------------------------------------------------------------

    async def nodes(self) -> Objects:
        return _items(await self._wire.json("GET", "/nodes"), "nodes")

    async def drain_node(self, name: str) -> JsonObject:
        """Drains a node: it takes no more rollouts and finishes those it has. It is empty when `live` is 0."""
        return read_object(await self._wire.json("POST", f"/nodes/{part(name)}/drain"))

    async def resume_node(self, name: str) -> JsonObject:
        return read_object(await self._wire.json("POST", f"/nodes/{part(name)}/resume"))

    # --- other addresses ------------------------------------------------------------------------------

    async def get_json(self, path: str, **params: str | int | float | None) -> JsonObject:
        """The JSON object at an address below /v1, such as "/rollouts/ID/timeline"; for addresses without a method."""
        return read_object(await self._wire.json("GET", path, params=params))

    # --- the service itself ---------------------------------------------------------------------------

    async def status(self) -> JsonObject:
        """The state of the service: versions, states, pools, engines, runtimes, environments."""
        return read_object(await self._wire.json("GET", "/status"))

    async def overview(self) -> JsonObject:
        """What a dashboard shows first: the flow of rollouts, the last hour, failures, alerts, engines and nodes."""
        return read_object(await self._wire.json("GET", "/overview"))

    async def results(
        self, *, search: str | None = None, after: str | None = None, limit: int = 50, **filters: str | float | None
    ) -> JsonObject:
        """A page of rollouts as rows of a table, newest first. `filters` are those of `GET /v1/results`: run,
        environment, agent, policy, version, outcome, code, state, group, trainable, min_reward, max_reward."""
        chosen = {"search": search, "after": after, **filters, "limit": limit}
        params = {name: str(value).lower() if isinstance(value, bool) else value for name, value in chosen.items()}
        return read_object(await self._wire.json("GET", "/results", params=params))

    async def series(self, run: str, *, by: str = "time", points: int = 60) -> JsonObject:
        """A run's figures over time, or over weight versions (`by="version"`)."""
        return read_object(
            await self._wire.json("GET", f"/runs/{part(run)}/series", params={"by": by, "points": points})
        )

    async def resize_pools(
        self,
        *,
        init: int | None = None,
        run: int | None = None,
        eval: int | None = None,
        ready: int | None = None,
        live: int | None = None,
    ) -> JsonObject:
        """Sets the given sizes and returns all pools."""
        sizes = without_none(init=init, run=run, eval=eval, ready=ready, live=live)
        return read_object(await self._wire.json("PATCH", "/pools", body=sizes))

    def events(self, *, after: str | None = None, run: str | None = None) -> AsyncIterator[Event]:
        """Changes of state, without end. Reconnects after the last event received. `Event` describes gaps."""
        return follow(self._wire, after, run)


def _include_results(results: bool) -> dict[str, str | None]:
    return {"include": "results" if results else None}


def _items(body: object, key: str) -> Objects:
    return [read_object(item) for item in read_object(body).get(key) or ()]
