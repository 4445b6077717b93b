"""The child process that generates and scores items of reasoning-gym: one JSON value in, one out (`envs.children`).

In:  {"do": "make" | "solve" | "score", "family", "seed", "index", "size", "config", "answer" (to score, or null)}
Out: {"question", "sha256"} · {"answer"} or null · {"score", "why" (it could not be scored, or null), "sha256"}
     {"invalid": "…"}: there is no such item; {"error": "…"}: the family's scorer is broken

Invariants. The same data produce the same item in every process: it must run with PYTHONHASHSEED=0, because some
families iterate over sets. Each answer is scored in its own fork, with limited memory and processor time, so that it
cannot affect the next one. If a scorer raises, dies or runs out of time on an answer but not on the known answer, the
answer broke it and scores 0. If it fails on the known answer as well, the family is at fault and there is no score.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import resource
import sys
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, cast

from rollyard.core import Json
from rollyard.envs.children import answer_lines
from rollyard.envs.reasoning import guard
from rollyard.envs.reasoning.environment import near
from rollyard.envs.reasoning.oracle import known_answers

SCORE_CPU_S = 10
"""Processor time, so that a busy machine does not count. Every family's known answer needs less than half a second."""
MEMORY_BYTES = 2 << 30
"""With everything imported, the process uses 0.4 GiB."""


class NoSuchItem(Exception):
    """The data describe no item. Trying again does not help."""


@dataclasses.dataclass(frozen=True, slots=True)
class Item:
    dataset: Any
    entry: Mapping[str, Any]

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.entry["question"].encode()).hexdigest()


def answer(question: Json) -> Json:
    asked = cast("dict[str, Any]", question)
    try:
        # equal data give one cache key, in whatever order their fields are
        config = json.dumps(asked["config"], sort_keys=True)
        item = _item(asked["family"], asked["seed"], asked["size"], config, asked["index"])
    except NoSuchItem as error:
        return {"invalid": str(error)[:2000]}
    if asked["do"] == "make":
        return {"question": item.entry["question"], "sha256": item.sha256}
    if asked["do"] == "solve":
        return {"answer": _known(item)}
    return {**_judged(item, asked["answer"]), "sha256": item.sha256}


@lru_cache(maxsize=256)
def _item(family: str, seed: int, size: int, config: str, index: int) -> Item:
    try:
        dataset = _dataset(family, seed, size, config)
        return Item(dataset, dataset[index])
    except NoSuchItem:
        raise
    except Exception as error:  # deterministic: the same data raise the same error
        raise NoSuchItem(f"{family} cannot make item {index}: {type(error).__name__}: {error}") from error


@lru_cache(maxsize=16)
def _dataset(family: str, seed: int, size: int, config: str) -> Any:
    from reasoning_gym.composite import DatasetSpec
    from reasoning_gym.factory import DATASETS, create_dataset

    if family not in DATASETS:
        raise NoSuchItem(f"there is no family {family!r}{near(family, DATASETS)}")
    options = json.loads(config)
    known = {field.name for field in dataclasses.fields(DATASETS[family][1])} - {"seed", "size"}
    unknown = sorted(set(options) - known)
    if unknown:
        raise NoSuchItem(f"config.{unknown[0]}: {family} has no such option; it has {', '.join(sorted(known))}")
    try:
        if family == "composite" and isinstance(options.get("datasets"), list):
            options["datasets"] = [DatasetSpec(**{"config": {}, **part}) for part in options["datasets"]]
        return create_dataset(family, seed=seed, size=size, **options)
    except Exception as error:
        raise NoSuchItem(f"config: {family} rejects it: {type(error).__name__}: {error}") from error


def _known(item: Item) -> str | None:
    """The known answer with the highest score."""
    return max(known_answers(item.entry), key=lambda text: guard.score(item.dataset, item.entry, text), default=None)


def _judged(item: Item, candidate: str | None) -> dict[str, Json]:
    score, why = _scored(item, candidate)
    if why is None:
        return {"score": score, "why": None}
    _, broken = _scored(item, next(known_answers(item.entry), None))
    if broken is not None:
        raise RuntimeError(f"the scorer also fails on the known answer: {broken}")
    return {"score": 0.0, "why": why}


def _scored(item: Item, candidate: str | None) -> tuple[float, str | None]:
    """Returns the score and why there is none, or None."""
    receiver, sender = os.pipe()
    process = os.fork()
    if process == 0:
        _score_and_end(item, candidate, sender)
    os.close(sender)
    with os.fdopen(receiver, "rb") as pipe:
        output = pipe.read()
    _, status = os.waitpid(process, 0)
    if status != 0 or not output:
        number = os.waitstatus_to_exitcode(status)
        return 0.0, f"the scorer ended with {number}" if number >= 0 else f"the scorer was ended by signal {-number}"
    score, why = json.loads(output)
    return score, why


def _score_and_end(item: Item, candidate: str | None, sender: int) -> None:
    try:
        os.close(0)  # scorers must not reach the socket to the parent
        resource.setrlimit(resource.RLIMIT_CPU, (SCORE_CPU_S, SCORE_CPU_S))
        guard.fence()
        score = float(guard.score(item.dataset, item.entry, candidate))
        verdict = [min(max(score, 0.0), 1.0), None] if math.isfinite(score) else [0.0, f"the scorer returned {score}"]
    except BaseException as error:
        verdict = [0.0, f"{type(error).__name__}: {error}"[:500]]
    try:
        os.write(sender, json.dumps(verdict).encode())
    finally:
        os._exit(0)


def main() -> None:
    import reasoning_gym  # noqa: F401  # registers all families

    sys.dont_write_bytecode = True  # for imports after `fence`
    guard.close_evals()
    answer_lines(answer, memory_bytes=MEMORY_BYTES)


if __name__ == "__main__":
    main()
