"""Runs inside a sandbox: loads a solution and calls what it defines, one request per line of standard input.

The first line is {"file", "prelude", "time_s", "memory_bytes", "processes"}; each line after it is one request:

    {"op": "call", "on": null | ID, "name": "f", "args": […], "kwargs": {…}}   calls the name, or the object ID itself
    {"op": "get" | "set", "on": ID, "name": "left", "value": …}
    "wants_args": true in a call: the answer includes the arguments as they are after the call

The answer is {"value": …, "args": …} or {"raised": [KIND, TEXT]}. Only data is sent: an object that is no plain value
stays here and is sent as a number. The solution shares this process and may send any answer; no expected value is ever
sent here, so the solution cannot read it.

Runs as `python3 -c`, with the image's own Python, 3.7 or newer. The service imports only `encode` and `decode`.
"""

import builtins
import json
import sys

BIG = 1 << 53  # larger integers are slow to parse as decimals, and Python refuses 4301 digits

LISTED = ("deque", "range", "dict_keys", "dict_values", "dict_items")
"""Types that are sent as lists, like iterators."""

KNOWN = """
from typing import *
from collections import *
from itertools import *
from functools import *
from heapq import *
from bisect import *
import bisect, collections, functools, heapq, itertools, math, operator, random, re, string, sys
"""


def encode(value, keep):
    """A value as JSON. `keep` returns a number for an object that is not data."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        number = int.__int__(value)
        return number if -BIG < number < BIG else {"int": hex(number)}
    if isinstance(value, float):
        number = float.__float__(value)
        return number if number - number == 0 else {"float": repr(number)}
    if isinstance(value, complex):
        return {"complex": [encode(value.real, keep), encode(value.imag, keep)]}
    if isinstance(value, list):
        return [encode(item, keep) for item in value]
    for kind in (tuple, set, frozenset):
        if isinstance(value, kind):
            return {kind.__name__: [encode(item, keep) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[encode(key, keep), encode(item, keep)] for key, item in value.items()]}
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": bytes(value).hex()}
    if type(value).__name__ in LISTED or hasattr(value, "__next__"):
        return [encode(item, keep) for item in value]
    if hasattr(value, "tolist") and not isinstance(value, type):  # numpy
        return encode(value.tolist(), keep)
    return {"object": keep(value)}


def decode(value, find):
    """The inverse of `encode`. `find` returns the object of a number. Raises ValueError, TypeError or KeyError for
    invalid input."""
    if isinstance(value, list):
        return [decode(item, find) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind == "int":
        return int(inner, 16)
    if kind == "float":
        return float(inner)
    if kind == "complex":
        return complex(decode(inner[0], find), decode(inner[1], find))
    if kind in ("tuple", "set", "frozenset"):
        return {"tuple": tuple, "set": set, "frozenset": frozenset}[kind](decode(item, find) for item in inner)
    if kind == "dict":
        return {decode(key, find): decode(item, find) for key, item in inner}
    if kind == "bytes":
        return bytes.fromhex(inner)
    if kind == "object":
        return find(inner)
    raise ValueError("unknown kind of value")


class Worker:
    """Holds the solution's names and the objects that were sent as numbers."""

    def __init__(self, names):
        self.names = names
        self.objects = []

    def keep(self, value):
        for number, known in enumerate(self.objects):
            if known is value:
                return number
        self.objects.append(value)
        return len(self.objects) - 1

    def find(self, number):
        """The object of a number, or the builtin of a name: an assert may pass `int` as an argument."""
        return getattr(builtins, number) if isinstance(number, str) else self.objects[number]

    def named(self, name):
        if name in self.names:
            return self.names[name]
        solution_class = self.names.get("Solution")
        if solution_class is None or not hasattr(solution_class, name):
            raise NameError("the solution does not define " + name)
        return getattr(solution_class(), name)

    def answer(self, request):
        on = request["on"]
        if request["op"] == "get":
            return {"value": encode(getattr(self.objects[on], request["name"]), self.keep)}
        if request["op"] == "set":
            setattr(self.objects[on], request["name"], decode(request["value"], self.find))
            return {"value": None}
        called = self.named(request["name"]) if on is None else self.objects[on]
        args, kwargs = decode(request["args"], self.find), decode(request["kwargs"], self.find)
        value = called(*args, **kwargs)  # type: ignore
        answer = {"value": encode(value, self.keep)}
        if request.get("wants_args"):
            try:
                answer["args"] = encode(args, self.keep)
            except RecursionError:  # the solution put a list into itself; its value may still be right
                pass
        return answer


def limit(time_s, memory_bytes, processes):
    """Irreversible: a process cannot raise its own hard limits."""
    import resource

    seconds = max(1, int(time_s) + (time_s > int(time_s)))
    for kind, soft, hard in (
        (resource.RLIMIT_CPU, seconds, seconds + 1),  # SIGXCPU at the limit; SIGKILL if that is ignored
        (resource.RLIMIT_NPROC, processes, processes),
        (resource.RLIMIT_AS, memory_bytes, memory_bytes),
        (resource.RLIMIT_CORE, 0, 0),
    ):
        if hard is not None:
            most = resource.getrlimit(kind)[1]
            if most != resource.RLIM_INFINITY:
                soft, hard = min(soft, most), min(hard, most)
            resource.setrlimit(kind, (soft, hard))


def load(file, prelude):
    import types

    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    names = module.__dict__
    exec(KNOWN, names)
    exec(compile(prelude, "<prelude>", "exec", dont_inherit=True), names)
    with open(file, "rb") as source:
        exec(compile(source.read(), file, "exec", dont_inherit=True), names)
    return names


def main():
    import os

    requests = os.fdopen(os.dup(0), "r", encoding="utf-8")
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    settings = json.loads(requests.readline())
    limit(settings["time_s"], settings["memory_bytes"], settings["processes"])
    worker = None
    for line in requests:
        try:
            if worker is None:
                worker = Worker(load(settings["file"], settings["prelude"]))
            answer = json.dumps(worker.answer(json.loads(line)))
        except BaseException as error:
            answer = json.dumps({"raised": [type(error).__name__, str(error)[:1000]]})
        replies.write(answer + "\n")
        replies.flush()
    os._exit(0)  # even if threads of the solution still run


if __name__ == "__main__":
    main()
