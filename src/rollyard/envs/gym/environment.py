"""The `gym` environment: seeds a session at a resources server, offers its tools, and scores with its verifier.

    {"server": "counter",
     "row": {"responses_create_params": {"input": […], "tools": […]}, "expected_count": 6, …},
     "oracle": [{"tool": "increment_counter", "arguments": {"count": 1}}, {"answer": "6"}]}

The operator lists the servers that may be called (the setting `gym_servers`). A task names one of them, or contains
the URL of one; any other URL is refused, because the service can reach hosts that its clients cannot.

Blame. If the server refuses the row at the seed, the blame is `task`. If the server cannot be reached or does not
answer, at any call, or if its verdict is not a number, the blame is `infra`. Errors of tools are observations. The
server limits what it runs for `/verify` itself, so if that takes all of EVAL's time there is no verdict either.

The server computes the verdict from what this process sends it: no tool can call `/verify`, and the model sees only
`responses_create_params` of the row. EVAL may be repeated, also in another process, as long as the server still has the
session. If it no longer has the session, its reply decides: an error gives no reward, a reward of 0 counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import aiohttp
import orjson

from rollyard.core import DataField, Json, Message, Score, Task
from rollyard.core.failure import SetupFailed, TaskInvalid, ToolUnreachable, VerifierCrashed
from rollyard.envs.base import EnvContext, Environment, Evidence, Plan, Solution, Start, check_options
from rollyard.envs.findings import Findings
from rollyard.envs.gym.response import response_of
from rollyard.envs.gym.row import FIELDS, PARAMS, GymData, params_of
from rollyard.envs.gym.session import GymSession, Reply, Unreachable, encoded, new_http
from rollyard.envs.gym.tool import GymTool
from rollyard.tools.base import Tool

INFO = "gym"
"""The key in the trajectory's info: `{"cookies": {…}}`. The cookies give full access to the session."""

SHARE = 0.9
"""The share of a stage's time for its one call, so that a server that hangs is not reported as a slow stage."""

REPLY_BYTES = 64 << 20
"""The limit of a seed's or verdict's reply. A verdict repeats the row and the response."""

MOST_METRICS = 64

_SAMPLING = {"temperature": "temperature", "top_p": "top_p", "max_output_tokens": "max_tokens"}


class GymEnvironment(Environment):
    """Scores with a resources server's verifier. `servers` are the operator's URLs by name."""

    name: ClassVar[str] = "gym"
    data_fields: ClassVar[tuple[DataField, ...]] = FIELDS

    def __init__(self, servers: Mapping[str, str] | None = None) -> None:
        self._servers = {name: url.rstrip("/") for name, url in (servers or {}).items()}
        self._http: aiohttp.ClientSession | None = None

    def check(self, task: Task) -> None:
        self._url_of(GymData.read(task))

    def plan(self, task: Task) -> Plan:
        return Plan(needs_sandbox=False, eval_needs_sandbox=False)

    async def init(self, context: EnvContext) -> Start:
        data, limits = GymData.read(context.task), context.task.limits
        cookies: dict[str, Json] = {}
        session = self._session(data, cookies)
        try:
            reply = await session.ask(
                "seed_session", encoded(data.row), most_bytes=REPLY_BYTES, within_s=SHARE * limits.init_s
            )
        except Unreachable as error:
            raise ToolUnreachable(f"the resources server {data.server}, seed_session: {error}") from error
        _check_seed(reply, data)
        tools = tuple(GymTool(spec, session, data.server, limits.output_bytes) for spec in data.tools)
        return Start(data.messages, tools, {INFO: {"cookies": cookies}})

    async def solve(self, context: EnvContext, tools: Mapping[str, Tool]) -> Solution:
        data = GymData.read(context.task)
        if data.steps is None:
            raise TaskInvalid("gym: data.oracle: this task has no solution, so there is no oracle for it")
        messages: list[Message] = []
        for index, step in enumerate(data.steps):
            arguments = encoded(step.arguments).decode()
            function: Json = {"name": step.tool, "arguments": arguments}
            call: Json = {"id": f"call_{index}", "type": "function", "function": function}
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
            result = await tools[step.tool].call(step.arguments, timeout_s=context.task.limits.tool_s)
            messages.append(
                {"role": "tool", "tool_call_id": f"call_{index}", "name": step.tool, "content": result.content}
            )
        if data.answer is not None:
            messages.append({"role": "assistant", "content": data.answer})
        return Solution(messages=tuple(messages))

    async def eval(self, context: EnvContext, evidence: Evidence) -> Score:
        data = GymData.read(context.task)
        session = self._session(data, _session_cookies(evidence))
        response = response_of(data, evidence.trajectory)
        within_s = SHARE * context.task.limits.eval_s
        body = encoded({**data.row, "response": response})
        try:
            reply = await session.ask("verify", body, most_bytes=REPLY_BYTES, within_s=within_s)
        except Unreachable as error:
            raise VerifierCrashed(f"the resources server {data.server}, verify: {error}") from error
        return _score(reply, data, context.findings)

    def from_row(self, row: Mapping[str, Json], options: Mapping[str, str]) -> Mapping[str, Json]:
        """Options: `server`, the operator's name of it; `oracle`, the row's field that contains the oracle's steps."""
        check_options(self.name, options, ("server", "oracle"))
        if not options.get("server"):
            raise TaskInvalid("gym: set the resources server of these rows: --set server=NAME")
        params = params_of(row)
        if params is None:
            raise TaskInvalid(f"gym: this is not a row of a Gym dataset: it has no object {PARAMS!r}")
        field = options.get("oracle", "")
        if field and field not in row:
            raise TaskInvalid(f"gym: the row has no field {field!r}, which the option `oracle` names")
        data: dict[str, Json] = {"server": options["server"]}
        data["row"] = {name: value for name, value in row.items() if name != field}
        if field:
            data["oracle"] = row[field]
        GymData.read(Task(self.name, data))
        sampling = {
            sampling_name: _number(params, name)
            for name, sampling_name in _SAMPLING.items()
            if params.get(name) is not None
        }
        body: dict[str, Json] = {"environment": self.name, "data": data}
        return {**body, "sampling": sampling} if sampling else body

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()

    def _url_of(self, data: GymData) -> str:
        url = data.server.rstrip("/")
        if url in self._servers.values():
            return url
        if data.server not in self._servers:
            known = ", ".join(sorted(self._servers)) or "none"
            raise TaskInvalid(
                f"gym: data.server: there is no resources server {data.server!r}; the operator has named: {known}",
                field="data.server",
            )
        return self._servers[data.server]

    def _session(self, data: GymData, cookies: dict[str, Json]) -> GymSession:
        if self._http is None:
            self._http = new_http()
        return GymSession(self._http, self._url_of(data), cookies)


def _check_seed(reply: Reply, data: GymData) -> None:
    if reply.status in (400, 422):
        raise SetupFailed(f"the resources server {data.server} refused this row: {reply.excerpt}")
    if not reply.is_good:
        raise ToolUnreachable(f"the resources server {data.server} created no session: {reply.excerpt}")
    if not data.tools and (_object(reply) or {}).get("mcp"):
        # The server also serves these tools at plain paths; if the row names them, they are called there.
        raise TaskInvalid(
            f"gym: the resources server {data.server} offers its tools over MCP, and the row names none: add them"
            f" to {PARAMS}.tools",
            field=f"data.row.{PARAMS}.tools",
        )


def _session_cookies(evidence: Evidence) -> dict[str, Json]:
    session_info = evidence.trajectory.info.get(INFO)
    cookies = session_info.get("cookies") if isinstance(session_info, Mapping) else None
    if not isinstance(cookies, Mapping):
        raise VerifierCrashed("the record has no session of the resources server: there is nothing to verify")
    return dict(cookies)


def _score(reply: Reply, data: GymData, findings: Findings) -> Score:
    """The score of a verdict, which is added to the findings without the row. Raises VerifierCrashed."""
    who = f"the resources server {data.server}"
    if not reply.is_good:
        raise VerifierCrashed(f"{who} did not verify: {reply.excerpt}")
    verdict = _object(reply)
    if verdict is None:
        raise VerifierCrashed(f"{who} returned a verdict that is not a JSON object: {reply.excerpt}")
    shown = {name: value for name, value in verdict.items() if name not in {*data.row, "response"}}
    findings.add("check", data.server, orjson.dumps(shown))
    if failed := verdict.get("_ng_failure_class"):  # for example, its judge did not answer: the reward is meaningless
        message = verdict.get("_ng_failure_message") or verdict.get("_ng_failure_judge_error")
        why = message or "no reason given"
        raise VerifierCrashed(f"{who} could not verify: {failed}: {why}")
    reward = _finite(verdict.get("reward"))
    if reward is None or isinstance(verdict.get("reward"), bool):
        raise VerifierCrashed(f"{who} returned a verdict without a reward: {reply.excerpt}")
    parts = verdict.get("reward_components")
    excluded = {*data.row, "response", "reward"}
    return Score(
        reward,
        components=_numbers(parts) if isinstance(parts, Mapping) else {},
        metrics=_numbers({name: value for name, value in verdict.items() if name not in excluded}),
    )


def _numbers(values: Mapping[str, Json]) -> dict[str, float]:
    numbers = {name: number for name, value in values.items() if (number := _finite(value)) is not None}
    return dict(list(numbers.items())[:MOST_METRICS])


def _finite(value: Json) -> float | None:
    """A number, or true and false as 1 and 0."""
    return float(value) if isinstance(value, bool | int | float) and math.isfinite(value) else None


def _object(reply: Reply) -> Mapping[str, Json] | None:
    try:
        value = orjson.loads(reply.body)
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None


def _number(params: Mapping[str, Json], name: str) -> Json:
    value = params[name]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TaskInvalid(f"gym: data.row.{PARAMS}.{name}: a number was expected", field=f"data.row.{PARAMS}.{name}")
    return value
