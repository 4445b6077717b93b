"""A Jupyter kernel driven by `jupyter_client`: the same cell again and again. Prints JSON.

Waits for what a user of it waits for: the output on the IOPub channel, then the kernel's `idle`. The client is the
blocking one, without an event loop between it and ZeroMQ.
"""

from __future__ import annotations

import json
import statistics
import sys
import time

from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager


def run(client: BlockingKernelClient, code: str) -> str:
    sent = client.execute(code)
    output = ""
    while True:
        message = client.get_iopub_msg(timeout=30)
        if message["parent_header"].get("msg_id") != sent:
            continue
        kind, content = message["msg_type"], message["content"]
        if kind == "stream":
            output += content["text"]
        elif kind == "execute_result":
            output += content["data"]["text/plain"] + "\n"
        elif kind == "status" and content["execution_state"] == "idle":
            return output


def start() -> tuple[KernelManager, BlockingKernelClient, float]:
    started_at = time.perf_counter()
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel()
    client = manager.blocking_client()
    client.start_channels()
    client.wait_for_ready(timeout=60)
    assert run(client, "0") == "0\n"
    return manager, client, (time.perf_counter() - started_at) * 1000


def main(count: int, starts: int) -> None:
    started: list[float] = []
    for _ in range(starts - 1):
        manager, client, took_ms = start()
        started.append(took_ms)
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    manager, client, took_ms = start()
    started.append(took_ms)
    times: list[float] = []
    try:
        for number in range(count + 20):
            started_at = time.perf_counter()
            answer = run(client, f"x = {number}\nprint('hello')\nx + 1")
            if number >= 20:
                times.append((time.perf_counter() - started_at) * 1000)
            assert answer == f"hello\n{number + 1}\n", answer
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    times.sort()
    result = {"cell_p50_ms": statistics.median(times), "cell_p99_ms": times[int(len(times) * 0.99)]}
    print(json.dumps(result | {"cells": count, "start_ms": statistics.median(started)}), flush=True)


main(int(sys.argv[1]), 3)
