"""verifiers: its environment, interception server and eval client, a harness in this process, a function as tool.

    verifiers.py ENGINE_URL TURNS CONCURRENCY

The harness calls the model through the interception server, as verifiers asks of every harness, over aiohttp (lighter
than the OpenAI client of its own harnesses), and starts no process. The tool call is read from the text: the scripted
engine has no tool calls of its own. Prints one JSON object when as many rollouts as run at once have ended as they
should; then it goes on, for others to measure, until its standard input ends. A rollout that ends otherwise ends the
process with status 1.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from collections.abc import Iterable

import aiohttp
import verifiers.v1 as vf
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

URL, TURNS, CONCURRENCY = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
PLUGIN = "rollyard_bench"

__all__ = ["EchoHarness", "EchoTaskset"]


def echo(text: str) -> str:
    return text + "\n"


class EchoTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def correct(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.endswith("ANSWER: 4"))


class EchoTaskset(vf.Taskset[EchoTask, vf.TasksetConfig]):
    def load(self) -> Iterable[EchoTask]:
        yield EchoTask(vf.TaskData(prompt="What is 2 + 2?"), self.config.task)


class EchoHarness(vf.Harness[vf.HarnessConfig]):
    NEEDS_CONTAINER = False
    EXECUTES_CODE = False
    client: aiohttp.ClientSession

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data) -> vf.ProgramResult:
        messages = [{"role": "user", "content": data.prompt}]
        headers = {"Authorization": f"Bearer {secret}"}
        while True:
            body = {"model": ctx.model, "messages": messages}
            async with self.client.post(f"{endpoint}/chat/completions", json=body, headers=headers) as response:
                response.raise_for_status()
                text = (await response.json())["choices"][0]["message"]["content"]
            call = json.loads(text.partition("<tool_call>")[2].partition("</tool_call>")[0])
            echoed = echo(**call["arguments"])
            if "ANSWER:" in text:
                return vf.ProgramResult(exit_code=0, stdout=echoed, stderr="")
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": echoed}]


def check(episode: vf.Episode) -> None:
    assert episode.ok, [error.message for trace in episode.traces for error in trace.errors] or episode.errors
    (trace,) = episode.traces
    assert trace.num_turns == TURNS and trace.reward == 1.0, (trace.num_turns, trace.reward)


async def main() -> None:
    ended = 0
    config = {"taskset": {"id": PLUGIN}, "agent": {"harness": {"id": PLUGIN}, "runtime": {"type": "subprocess"}}}
    env = load_environment(resolve_env_config(config))
    (task,) = env.taskset
    ctx = vf.ModelContext(model="scripted", client=vf.EvalClientConfig(base_url=f"{URL}/v1", api_key_var="NO_KEY"))

    async def work() -> None:
        nonlocal ended
        while True:
            (slot,) = env.slots(task)
            check(await env.run_slot(slot, ctx))
            ended += 1
            if ended == CONCURRENCY:
                print(json.dumps({"turns_per_rollout": TURNS}), flush=True)

    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as EchoHarness.client,
        env.serving(),
        asyncio.TaskGroup() as group,
    ):
        for _ in range(CONCURRENCY):
            group.create_task(work())


def end_with_stdin() -> None:
    os.read(0, 1)
    os._exit(0)


if __name__ == "__main__":
    sys.modules[PLUGIN] = sys.modules["__main__"]  # plugins are found by the name of their module
    threading.Thread(target=end_with_stdin, daemon=True).start()
    asyncio.run(main())
