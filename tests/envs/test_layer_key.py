"""A layer key covers everything that determines the set-up's files, and nothing else."""

from dataclasses import replace

from rollyard.core import Json, Limits, Task
from rollyard.envs.base import EnvContext, Environment, Plan
from rollyard.envs.math.environment import MathEnvironment
from rollyard.envs.shell import ShellEnvironment


class Prepared(Environment):
    name = "prepared"

    def __init__(self, **env: str) -> None:
        self._env = env

    def plan(self, task: Task) -> Plan:
        return Plan(env=self._env)

    async def prepare(self, context: EnvContext) -> None: ...


class Other(Prepared):
    name = "other"


TASK = Task("prepared", {"a": 1, "b": [{"c": 2.5}]})


def test_an_environment_without_prepare_has_no_key():
    assert MathEnvironment().layer_key(Task("math", {"question": "1+1", "answer": "2"})) is None


def test_equal_tasks_have_equal_keys_in_whatever_order_their_data_is_written():
    again = Task("prepared", {"b": ({"c": 2.5},), "a": 1}, limits=Limits(init_s=1))
    assert Prepared().layer_key(TASK) == Prepared().layer_key(again)


def test_data_variables_and_environment_each_change_the_key():
    keys = [
        Prepared().layer_key(TASK),
        Prepared().layer_key(replace(TASK, data={"a": 2})),
        Prepared(LANG="C").layer_key(TASK),
        Other().layer_key(TASK),
    ]
    assert None not in keys
    assert len(set(keys)) == len(keys)


def test_an_environment_without_source_is_not_shared():
    space: dict[str, type[Environment]] = {"Prepared": Prepared}
    exec("class Typed(Prepared):\n    name = 'typed'\n    __module__ = 'nowhere'", space)
    assert space["Typed"]().layer_key(TASK) is None


def test_the_key_of_shell_covers_its_files_and_commands():
    def key(**data: Json) -> str | None:
        return ShellEnvironment().layer_key(Task("shell", {"instruction": "x", "checks": ["true"], **data}))

    assert key() is None, "there is nothing to set up"
    assert key(files={"a": "b"}) == key(files={"a": "b"}, instruction="y", checks=["false"], eval="same")
    assert len({key(files={"a": "b"}), key(files={"a": "c"}), key(setup=["a"]), key(setup=["a", "b"])}) == 4
