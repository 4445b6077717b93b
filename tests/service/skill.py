"""A policy of known skill: whether a rollout succeeds is a function of its id, on any engine and after any restart."""

from collections.abc import Callable
from random import Random

from rollyard.core import id_of
from rollyard.testing.script import FolderTokenizer, Reply, Turn
from rollyard.testing.scripted_engine import ScriptedEngine
from rollyard.testing.tokenizer_files import tokenizer_dir
from tests.service.site import finish, shell

CHECK = ["test -f done"]


def member_of(rollout_id: str) -> tuple[str, int]:
    """ "d.0.3.0-5" → ("d.0.3.0", 5)"""
    group, _, index = rollout_id.rpartition("-")
    return group, int(index)


def chance(rollout_id: str, seed: int = 0) -> float:
    return Random(f"{seed}/{rollout_id}").random()


def skilled(
    passes: Callable[[str], bool], latency_s: Callable[[str], float] = lambda _: 0.0, **options: object
) -> ScriptedEngine:
    """Solves `task("do it", checks=CHECK)` if `passes` returns True for the rollout's id."""

    def script(turn: Turn) -> Reply:
        if "<|im_start|>" not in turn.text:
            return Reply("ok")  # the probe
        rollout_id = id_of(turn.session_id)
        wait_s = latency_s(rollout_id)
        if turn.number == 0 and passes(rollout_id):
            return Reply(shell("touch done"), latency_s=wait_s)
        return Reply(finish(), latency_s=wait_s)

    return ScriptedEngine(script, tokenizer=FolderTokenizer(tokenizer_dir()), **options)  # type: ignore[arg-type]
