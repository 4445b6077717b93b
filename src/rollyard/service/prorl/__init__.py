"""The API of ProRL Agent, so that a trainer written for it only changes a URL.

    /start  /stop  /status          opens, closes and reports the intake of jobs        intake.py
    /process  /cancel               a job is a durable rollout of the run `prorl`       jobs.py
    /add_llm_server  /clear_…       engines, whose kind is detected                     routes.py

The `data_source` of an instance selects how it becomes a task (`handlers.py`). The sampling parameters become the
task's sampling and limits (`sampling.py`), and a rollout's end becomes a result (`results.py`) whose messages contain
the tokens of the trace (`messages.py`).

Differences from ProRL Agent: a cancelled job returns 200 with a result that reports it, never 500; state survives the
process; an infrastructure failure is not a reward of 0; every rollout has its own deadlines.

Mounted only with the setting `prorl`. ProRL Agent's trainer sends no token. On loopback, if the operator has set no
tokens, these paths are therefore open to every caller on this machine. The gate still refuses foreign Hosts and pages
in browsers, no sandbox of an isolating runtime can reach the port, and everything under /v1 still needs a token. On a
shared machine, set tokens. Then, and always beyond loopback, a token is required, as `Authorization: Bearer TOKEN` or
in the URL (`http://prorl:TOKEN@host:port`), which is all that the trainer can change.
"""

from rollyard.service.prorl.routes import PATHS, mount, open_paths

__all__ = ["PATHS", "mount", "open_paths"]
