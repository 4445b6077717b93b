"""Runs the task's asserts inside EVAL's sandbox, with the solution in another process.

For each assert a new worker (`_worker`) loads the solution. Names of the solution that the assert uses are proxies
here: they send the arguments to the worker and receive data. So no code of the solution runs in this process, and the
asserts compare plain values, whose `==` is Python's own.

Invariants. This process is the first in its sandbox. It protects its memory and descriptors (PR_SET_DUMPABLE) before it
reads the asserts, and so before any process exists that could read them. It reads them from standard input, never from
a file, an argument or a variable. Each verdict is printed with the nonce that came with the asserts. After each assert,
all processes that it left are killed. The solution can kill this process; the asserts without a verdict then fail.

Runs as `python3 -I -c`, with the image's own Python, 3.7 or newer. Never imported by the service.
"""

import ast
import builtins
import ctypes
import json
import os
import signal
import subprocess
import sys
from typing import IO, Dict, cast  # noqa: UP035

MOST_BYTES = 64 << 20
"""The size limit of one answer."""

ROUNDS = 100
"""How often leftover processes are killed. A process that forks faster is bounded by the sandbox's limits."""

NOT_AS_THEY_ARE = (StopIteration, StopAsyncIteration, UnicodeError)
"""Raised here as SolutionRaised: the first two would end an `all(map(…))` in an assert as if it had passed, and the
last cannot be created from a string."""

PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 4, 36

MODULES = "import bisect, collections, functools, heapq, itertools, math, operator, random, re, string, sys"


class TimeIsUp(BaseException):
    pass


class SolutionFailed(BaseException):
    """The solution exited or sent an invalid answer. `except Exception` in an assert does not catch it."""


class SolutionRaised(Exception):
    """The solution raised an exception whose class is not a builtin."""


class Clock:
    """Raises TimeIsUp once for each `start`, however often it is signalled: the solution can send signals, too."""

    is_running = False

    @classmethod
    def start(cls, wall_s):
        cls.is_running = True
        signal.setitimer(signal.ITIMER_REAL, wall_s)

    @classmethod
    def ring(cls, *_):
        if cls.is_running:
            cls.is_running = False
            raise TimeIsUp


class Remote:
    """A proxy for a function, class or object of the solution. Only calls and attributes are forwarded."""

    __slots__ = ("_name", "_on", "_session")

    def __init__(self, session, on, name=None):
        for slot, value in (("_session", session), ("_on", on), ("_name", name)):
            object.__setattr__(self, slot, value)

    def __call__(self, *args, **kwargs):
        session = self._session
        request = {"op": "call", "on": self._on, "name": self._name, "wants_args": True}
        return session.ask(dict(request, args=session.sent(list(args)), kwargs=session.sent(kwargs)), args)

    def __getattr__(self, name):
        if name.startswith("__") or self._on is None:
            raise AttributeError(name)
        return self._session.ask({"op": "get", "on": self._on, "name": name})

    def __setattr__(self, name, value):
        if self._on is None:
            raise AttributeError(name)
        self._session.ask({"op": "set", "on": self._on, "name": name, "value": self._session.sent(value)})

    def __bool__(self):
        raise TypeError("an object of the solution has no truth value here")


class Session:
    """The worker of one assert."""

    def __init__(self, job, codec):
        self._encode, self._decode = codec["encode"], codec["decode"]
        self._remotes = {}
        self._process = subprocess.Popen(
            [sys.executable, "-c", job["worker"]],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._requests, self._answers = cast("IO[bytes]", self._process.stdin), cast("IO[bytes]", self._process.stdout)
        self._write(job["settings"])

    def _write(self, value):
        try:
            self._requests.write(json.dumps(value).encode() + b"\n")
            self._requests.flush()
        except OSError:
            self._raise_ended()

    def _raise_ended(self):
        try:
            is_late = self._process.wait(1.0) == -signal.SIGXCPU
        except subprocess.TimeoutExpired:
            is_late = False
        raise TimeIsUp if is_late else SolutionFailed

    def sent(self, value):
        return self._encode(value, self._number)

    def _number(self, value):
        if type(value) is Remote and value._on is not None:
            return value._on
        name = getattr(value, "__name__", "")
        if isinstance(value, (type, type(len))) and getattr(builtins, name, None) is value:
            return name  # a builtin, which the worker also has; never in the other direction
        raise TypeError(type(value).__name__ + " cannot be passed to the solution: only data can")

    def _remote(self, number):
        number = int(number)
        return self._remotes.setdefault(number, Remote(self, number))

    def ask(self, request, arguments=()):
        self._write(request)
        line = self._answers.readline(MOST_BYTES)
        if not line.endswith(b"\n"):
            self._raise_ended()
        value = raised = None
        try:
            answer = json.loads(line.decode())
            if "raised" in answer:
                raised = [str(text) for text in answer["raised"]]
            else:
                value = self._decode(answer["value"], self._remote)
                self._change(arguments, self._decode(answer.get("args", []), self._remote))
        except Exception:
            raise SolutionFailed from None
        if raised is not None:
            kind = getattr(builtins, raised[0], None)
            if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, NOT_AS_THEY_ARE):
                raise kind(*raised[1:])
            raise SolutionRaised(*raised)
        return value

    @staticmethod
    def _change(arguments, now):
        """Applies the solution's in-place changes of arguments to the objects here."""
        for index in range(min(len(arguments), len(now))):
            old, new = arguments[index], now[index]
            if type(old) is list and type(new) is list:
                old[:] = new
            elif isinstance(old, (dict, set)) and type(new) is type(old):
                old.clear()
                old.update(new)


def kill_children():
    """Kills all descendants: this process is their subreaper, so orphans become its children."""
    for _ in range(ROUNDS):
        try:
            with open(f"/proc/self/task/{os.getpid()}/children") as file:
                children = [int(pid) for pid in file.read().split()]
        except OSError:
            return
        if not children:
            return
        for pid in children:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass
        for _ in children:
            try:
                os.waitpid(-1, 0)
            except OSError:
                break


def names_of(tree):
    """The names that the code uses, and the names that it defines."""
    used, defined = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else defined).add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            defined.add(node.name)
        elif isinstance(node, ast.arg):
            defined.add(node.arg)
        elif isinstance(node, ast.alias):
            defined.add((node.asname or node.name).split(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            defined.add(node.name)
    return used, defined


def run(job, codec, code):
    """Returns if the code ran to completion."""
    names: Dict[str, object] = {"__name__": "tests"}  # noqa: UP006 (3.7)
    exec(MODULES, names)
    Clock.start(job["wall_s"])
    session = Session(job, codec)
    exec(compile(job["settings"]["prelude"], "<prelude>", "exec", dont_inherit=True), names)
    tree = ast.parse(code)
    used, defined = names_of(tree)
    stand_ins = used - defined - set(names) - set(dir(builtins))
    if job["entry_point"]:
        stand_ins.add(job["entry_point"])
    for name in stand_ins:
        names[name] = Remote(session, None, name)
    exec(compile(tree, "<assert>", "exec", dont_inherit=True), names)


def verdict(job, codec, code):
    try:
        try:
            run(job, codec, code)
            return "passed"
        except TimeIsUp:
            return "timed_out"
        except BaseException:
            return "failed"
    except TimeIsUp:  # raised while the handler above started
        return "timed_out"


def main():
    libc = ctypes.CDLL(None)
    if libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        raise OSError("PR_SET_DUMPABLE was refused")
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, Clock.ring)
    job = json.loads(sys.stdin.buffer.read().decode())
    codec = {"__name__": "codec"}
    exec(job["worker"], codec)
    verdict_fd = os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)  # output of the asserts must not look like a verdict
    os.write(verdict_fd, f"{job['nonce']} tester ready\n".encode())
    late = 0
    for index, code in enumerate(job["asserts"]):
        outcome = verdict(job, codec, code) if late < job["most_late"] else "skipped"
        Clock.is_running = False
        kill_children()
        late += outcome == "timed_out"
        os.write(verdict_fd, f"{job['nonce']} {index} {outcome}\n".encode())
    os._exit(0)


if __name__ == "__main__":
    main()
