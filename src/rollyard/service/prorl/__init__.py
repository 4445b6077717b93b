"""The reference system's own API, so that a trainer written for it only changes a URL.

    /start  /stop  /status          the intake of jobs: open, shut, how it stands       intake.py
    /process  /cancel               a job is a durable rollout of the run `prorl`       jobs.py
    /add_llm_server  /clear_…       engines, found out by asking                        routes.py

An instance becomes a task by the name in its `data_source` (`handlers.py`), the sampling parameters become the task's
sampling and limits (`sampling.py`), and a rollout's end becomes a result (`results.py`) whose messages hold the tokens
of our trace (`messages.py`).

What that system does worse is not repeated here. A job that is cancelled answers 200 with a result that says so, never
500; state outlives the process; a failure of infrastructure is no reward of 0; every rollout keeps its own deadlines.

Mounted with the setting `prorl` only. Its trainer sends no token, so on loopback, and where the operator has set no
tokens, these paths are open to every caller on this machine: less could not be called, and more is not given, for the
gate still refuses foreign Hosts and every browser's page, no sandbox of an isolating runtime can reach the port, and
everything under /v1 needs its token as ever. Who shares the machine sets tokens: then, and always beyond loopback, one
is needed, as `Authorization: Bearer TOKEN` or in the URL, `http://prorl:TOKEN@host:port`, which is all a trainer can
change.
"""

from rollyard.service.prorl.routes import PATHS, mount, open_paths

__all__ = ["PATHS", "mount", "open_paths"]
