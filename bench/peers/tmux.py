"""A shell in tmux: `send-keys`, then `capture-pane` until it shows the end. Prints JSON.

`echo_p50_ms` does as OpenHands does: a prompt that reports, a look every 0.5 s until one more of them stands there, and
before the answer is given the screen is cleared for the next command, with its pause of 0.1 s.
`echo_p50_busy_ms` looks without a pause for the output itself: the best that tmux can give.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

SOCKET = f"rollyard-bench-{os.getpid()}"
END = "###PS1END###"
PROMPT = (
    r"""PS1='\n###PS1JSON###\n{"pid": "$!", "exit_code": "$?", "username": "\u", "hostname": "\h", """
    r""""working_dir": "$(pwd)", "py_interpreter_path": "$(which python3)"}\n###PS1END###\n'"""
)


def tmux(*arguments: str) -> str:
    return subprocess.run(["tmux", "-L", SOCKET, *arguments], capture_output=True, text=True, check=True).stdout


def screen() -> str:
    return tmux("capture-pane", "-p", "-S", "-", "-t", "main")


def polled(number: int) -> float:
    prompts = screen().count(END)
    started_at = time.perf_counter()
    tmux("send-keys", "-t", "main", f"echo hello {number}", "Enter")
    while (shown := screen()).count(END) <= prompts:
        time.sleep(0.5)
    assert f"\nhello {number}\n" in shown
    tmux("send-keys", "-t", "main", "C-l")
    time.sleep(0.1)
    tmux("clear-history", "-t", "main")
    return (time.perf_counter() - started_at) * 1000


def busy(number: int) -> float:
    started_at = time.perf_counter()
    # The marker is computed, so that the typed line itself does not show it.
    tmux("send-keys", "-t", "main", f"echo done-$(({number} + 1000000))", "Enter")
    while f"done-{number + 1000000}" not in tmux("capture-pane", "-p", "-t", "main"):
        pass
    return (time.perf_counter() - started_at) * 1000


def main(count: int) -> None:
    with tempfile.NamedTemporaryFile("w", suffix=".rc") as file:
        file.write(PROMPT)
        file.flush()
        tmux("new-session", "-d", "-s", "main", "-x", "200", "-y", "50", f"bash --noprofile --rcfile {file.name}")
        try:
            while END not in screen():
                time.sleep(0.05)
            slow = sorted(polled(number) for number in range(min(count, 40)))
            fast = sorted(busy(number) for number in range(count))
        finally:
            tmux("kill-server")
    result = {"echo_p50_ms": statistics.median(slow), "echo_p99_ms": slow[int(len(slow) * 0.99)]}
    print(json.dumps(result | {"echo_p50_busy_ms": statistics.median(fast), "calls": len(slow)}), flush=True)


main(int(sys.argv[1]))
