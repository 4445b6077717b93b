"""Runs inside a sandbox: loads a solution and calls what it defines, one request per line of standard input.

The first line is {"file", "prelude", "time_s", "memory_bytes", "processes"}; each line after it asks for one thing:

    {"op": "call", "on": null | ID, "name": "f", "args": […], "kwargs": {…}}   the name's, or the object's itself
    {"op": "get" | "set", "on": ID, "name": "left", "value": …}
    "wants_args": true of a call: the answer holds its arguments, too, as they are by then

and is answered with {"value": …, "args": …} or {"raised": [KIND, TEXT]}. Only data crosses: what is no plain value
stays here, and has a number. The solution shares this process and may answer whatever it likes; no expected value ever
comes here, so that it cannot know what to say.

Run as `python3 -c`, by the image's own Python, 3.7 or newer. Never imported by the service, but for `decode`.
"""

import builtins
import json
import sys

BIG = 1 << 53  # beyond it a number in decimal is slow to read, and Python refuses 4301 digits

LISTED = ("deque", "range", "dict_keys", "dict_values", "dict_items")
"""Kinds that cross as lists, as iterators do."""

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
    """A value as JSON. `keep` gives a number to what is no data."""
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
    if hasattr(value, "tolist") and not isinstance(value, type):  # numpy's
        return encode(value.tolist(), keep)
    return {"object": keep(value)}


def decode(value, find):
    """The opposite. `find` gives the object of a number. ValueError, TypeError or KeyError for what nobody encoded."""
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
    """The solution's names, and the objects that were handed out."""

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
        """Or what Python itself calls by that name: an assert may give `int` as an argument."""
        return getattr(builtins, number) if isinstance(number, str) else self.objects[number]

    def named(self, name):
        if name in self.names:
            return self.names[name]
        made = self.names.get("Solution")
        if made is None or not hasattr(made, name):
            raise NameError("the solution does not define " + name)
        return getattr(made(), name)

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
            except RecursionError:  # it put a list into itself; its value may be right
                pass
        return answer


def limit(time_s, memory_bytes, processes):
    """For good: a process cannot raise its own hard limits."""
    import resource

    seconds = max(1, int(time_s) + (time_s > int(time_s)))
    for kind, soft, hard in (
        (resource.RLIMIT_CPU, seconds, seconds + 1),  # SIGXCPU tells that it was time; SIGKILL for who ignores that
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

    asked = os.fdopen(os.dup(0), "r", encoding="utf-8")
    answered = os.fdopen(os.dup(1), "w", encoding="utf-8")
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    settings = json.loads(asked.readline())
    limit(settings["time_s"], settings["memory_bytes"], settings["processes"])
    worker = None
    for line in asked:
        try:
            if worker is None:
                worker = Worker(load(settings["file"], settings["prelude"]))
            answer = json.dumps(worker.answer(json.loads(line)))
        except BaseException as error:
            answer = json.dumps({"raised": [type(error).__name__, str(error)[:1000]]})
        answered.write(answer + "\n")
        answered.flush()
    os._exit(0)  # whatever threads the solution has left


if __name__ == "__main__":
    main()
