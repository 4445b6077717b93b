"""Helpers for tests of agent programs: scripts with the program's tools, and programs installed once per machine."""

import asyncio
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rollyard.agents.installation import AgentInstalls
from rollyard.agents.preset import Preset, TryTurn, built_in, read_preset
from rollyard.core import AgentSpec, Json, Limits, Task
from rollyard.sandbox.python import PythonBuilds
from rollyard.testing.script import Reply, Turn

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "rollyard"

GREETING = "greeting.txt says 'Hello, wrold!'. Correct its spelling."


def installed(name: str) -> AgentInstalls:
    """Returns installs that contain the preset. The first call on a machine downloads it."""
    installs = AgentInstalls(CACHE / "agents")
    asyncio.run(installs.install(preset(name)))
    return installs


def preset(name: str) -> Preset:
    return read_preset(built_in()[name])


def pythons() -> PythonBuilds:
    return PythonBuilds(CACHE / "python")


PROGRAM = """
import json, os, subprocess, sys, urllib.request
messages = [{"role": "user", "content": sys.argv[1]}]
parameters = {"type": "object", "properties": {"command": {"type": "string"}}}
tools = [{"type": "function", "function": {"name": "sh", "parameters": parameters}}]
def ask():
    body = json.dumps({"model": "policy", "messages": messages, "tools": tools}).encode()
    url = os.environ["BASE_URL"] + "/chat/completions"
    request = urllib.request.Request(url, body, {"content-type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]
print("it begins", flush=True)
while True:
    message = ask()
    messages.append(message)
    for call in message.get("tool_calls") or ():
        command = json.loads(call["function"]["arguments"])["command"]
        done = subprocess.run(command, shell=True, capture_output=True, text=True)
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": done.stdout + done.stderr})
    if not message.get("tool_calls"):
        break
print("it ends", flush=True)
"""
"""A typical agent: it keeps its history, runs the calls, and ends when there is none."""


def runs(code: str, *more: str, **options: Any) -> dict[str, Json]:
    """Returns options of the agent `command` for a program run by the portable Python: images need not have one."""
    command: list[Json] = ["{{python}}", "-c", code, "{{instruction}}", *more]
    return {"command": command, "env": {"BASE_URL": "{{base_url}}"}, **options}


def call(name: str, **arguments: Json) -> str:
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>"


def reply_text(turn: TryTurn) -> str:
    return "\n".join([*([turn.say] if turn.say else []), *(call(it.name, **it.arguments) for it in turn.calls)])


def plays(turns: Sequence[str | Reply]) -> Any:
    """Returns a script by the number of assistant turns in the prompt. A probe has no session and gets "ok"."""

    def script(turn: Turn) -> Reply | str:
        return turns[min(turn.number, len(turns) - 1)] if turn.session_id else "ok"

    return script


def greeting_task(agent: str, options: Mapping[str, Json] | None = None, **limits: Any) -> Task:
    bounds = Limits(init_s=30, run_s=50, eval_s=20, tool_s=10, model_s=20, max_turns=12)
    return Task(
        "shell",
        {
            "instruction": GREETING,
            "files": {"greeting.txt": "Hello, wrold!\n"},
            "checks": ["grep -qx 'Hello, world!' greeting.txt"],
        },
        agent=AgentSpec(agent, dict(options or {})),
        limits=replace(bounds, **limits),
    )
