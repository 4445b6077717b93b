"""`bash -lc COMMAND`, a new process for each: what most agent scaffolds do. Prints JSON."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time


def echo(number: int) -> float:
    started_at = time.perf_counter()
    completed = subprocess.run(["bash", "-lc", f"echo {number}"], capture_output=True, text=True, check=True)
    assert completed.stdout.strip() == str(number)
    return (time.perf_counter() - started_at) * 1000


def main(count: int) -> None:
    echo(0)
    times = sorted(echo(number) for number in range(count))
    result = {"echo_p50_ms": statistics.median(times), "echo_p99_ms": times[int(count * 0.99)]}
    print(json.dumps(result | {"calls": count}), flush=True)


main(int(sys.argv[1]))
