"""mini-swe-agent: its default agent, text-based LiteLLM model and local environment, one thread per rollout.

    mini_swe_agent.py ENGINE_URL TURNS CONCURRENCY

As its own batch runner does: everything is made anew for each rollout. Prints one JSON object when as many rollouts
as run at once have ended as they should; then it goes on, for others to measure, until its standard input ends. A
rollout that ends otherwise ends the process with status 1.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import traceback

os.environ["MSWEA_SILENT_STARTUP"] = "1"
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # otherwise fetched from the internet at import

from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_textbased_model import LitellmTextbasedModel

URL, TURNS, CONCURRENCY = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])

ended = 0
lock = threading.Lock()


def rollout() -> None:
    model = LitellmTextbasedModel(
        model_name="openai/scripted",
        model_kwargs={"api_base": f"{URL}/v1", "api_key": "none"},
        cost_tracking="ignore_errors",
    )
    agent = DefaultAgent(
        model,
        LocalEnvironment(),
        system_template="You solve tasks with bash, one command in each turn.",
        instance_template="{{task}}",
    )
    end = agent.run("What is 2 + 2?")
    assert end["exit_status"] == "Submitted" and end["submission"].strip() == "4", end
    assert agent.n_calls == TURNS, agent.n_calls
    outputs = [message["extra"]["raw_output"] for message in agent.messages if "raw_output" in message.get("extra", {})]
    assert outputs == [f"turn {turn}\n" for turn in range(1, TURNS)], outputs


def work() -> None:
    global ended
    try:
        while True:
            rollout()
            with lock:
                ended += 1
                if ended == CONCURRENCY:
                    print(json.dumps({"turns_per_rollout": TURNS}), flush=True)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


for _ in range(CONCURRENCY):
    threading.Thread(target=work, daemon=True).start()
os.read(0, 1)
os._exit(0)
