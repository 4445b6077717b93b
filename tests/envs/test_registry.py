from typing import ClassVar

import pytest

from rollyard.agents.base import Agent
from rollyard.core import Score, Task
from rollyard.core.failure import UnknownEnvironment
from rollyard.envs import EnvContext, Environment, Environments, Evidence, Start
from rollyard.envs.math.environment import MathEnvironment
from rollyard.envs.shell import ShellEnvironment
from rollyard.pipeline.handler import Handler

from .conftest import context, evidence


class Riddle(Handler):
    name: ClassVar[str] = "riddle"

    def __init__(self):
        self.is_closed = False

    async def init(self, context: EnvContext) -> Start:
        return Start(({"role": "user", "content": "?"},))

    async def run(self, context, messages) -> str:
        return "stop"

    async def eval(self, context: EnvContext, evidence: Evidence) -> Score:
        return Score(1.0)

    async def close(self) -> None:
        self.is_closed = True


def test_environments_are_found_by_entry_point():
    environments = Environments()
    assert isinstance(environments.get("shell"), ShellEnvironment)
    assert isinstance(environments.get("math"), MathEnvironment)
    assert environments.get("math") is environments.get("math")
    assert {"math", "shell"} <= set(environments.names)


def test_the_error_for_an_unknown_environment_lists_the_known_ones():
    with pytest.raises(UnknownEnvironment, match=r"'mahjong'; there are: .*math, .*shell"):
        Environments().get("mahjong")


async def test_extra_environments_can_be_given_and_are_closed():
    riddle = Riddle()
    async with Environments({"riddle": riddle, "shell": Riddle}) as environments:
        assert environments.get("riddle") is riddle
        assert isinstance(environments.get("shell"), Riddle)
    assert riddle.is_closed


async def test_a_handler_is_both_environment_and_agent():
    handler: Agent = Riddle()
    handler.check(Task("riddle"))
    assert handler.default_tools == ()
    assert isinstance(handler, Environment)
    assert await handler.run(None, ()) == "stop"  # type: ignore[arg-type]


async def test_a_method_that_is_not_defined_raises_type_error():
    env_context = context(Task("empty"))
    with pytest.raises(TypeError, match="does not define init"):
        await Environment().init(env_context)
    with pytest.raises(TypeError, match="does not define eval"):
        await Environment().eval(env_context, evidence())
    with pytest.raises(TypeError, match="does not define run"):
        await Handler().run(None, ())  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="no sandbox"):
        await env_context.run("ls", timeout_s=1)
