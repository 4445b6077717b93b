"""Servers of the real vLLM that share one import of it. Run by vLLM's own Python; see `tests/real_vllm.py`.

vLLM imports itself in three processes for each server, which is most of the cost of a start without a GPU. This process
imports it once. Each line of its input is a JSON object with the port, the log, the environment and the model of one
more server; each line of its output is the server's process id. The only change is that vLLM's processes start by fork
and not by spawn, which vLLM requires for CPUs so that each worker can have its own OpenMP settings. Here all have the
same.
"""

import json
import multiprocessing
import os
import signal
import sys
from contextlib import suppress
from importlib import import_module

STARTERS = ("vllm.v1.engine.utils", "vllm.v1.engine.coordinator", "vllm.v1.executor.multiproc_executor")
USED_LATER = (
    "vllm.entrypoints.cli.serve",
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.layers.quantization.online.base",
    "torch.distributed.tensor.experimental._attention",
)


def main() -> None:
    command = sys.argv[1:]
    for name in USED_LATER:
        import_module(name)
    forking = multiprocessing.get_context("fork")
    for name in STARTERS:
        starter = import_module(name)
        assert hasattr(starter, "get_mp_context"), f"{name} now starts its processes differently"
        starter.get_mp_context = lambda: forking  # type: ignore[attr-defined]
    print("ready", flush=True)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps servers that end
    servers: list[int] = []
    while line := os.read(0, 1 << 16):
        asked = json.loads(line)
        child = os.fork()
        if child == 0:
            serve(command, **asked)
        servers.append(child)
        print(child, flush=True)
    for server in servers:  # left by a test run that was killed
        with suppress(ProcessLookupError):
            os.killpg(server, signal.SIGKILL)


def serve(command: list[str], *, port: int, log: str, env: dict[str, str], model: str) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    os.environ.update(env)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, replaced in enumerate((nothing, file, file)):
        os.dup2(replaced, number)
    at = command.index("--port") + 1
    sys.argv = ["vllm", "serve", model, *command[2:at], str(port), *command[at + 1 :]]
    from vllm.entrypoints.cli.main import main as vllm_main  # type: ignore[import-not-found]

    sys.exit(vllm_main())


if __name__ == "__main__":
    main()
