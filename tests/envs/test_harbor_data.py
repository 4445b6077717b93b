"""Checks of a task's data, which any client may send, and the parsing of verdicts."""

from pathlib import Path
from typing import Any

import pytest

from rollyard.core import SandboxOptions, Task
from rollyard.core.failure import TaskInvalid
from rollyard.envs.harbor import HarborEnvironment
from rollyard.envs.harbor.files import write_files
from rollyard.envs.harbor.verdict import parse_verdict

from .harbor_folders import imported, write
from .stage_resources import to_play

GOOD: dict[str, Any] = {"instruction": "Do it", "tests": {"test.sh": "exit 0"}}


def check(change: dict[str, Any]) -> None:
    HarborEnvironment().check(Task("harbor", {**GOOD, **change}, sandbox=SandboxOptions(image="x")))


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({"instruction": ""}, "data.instruction: a string was expected"),
        ({"tests": None}, "data.tests: an object of files"),
        ({"tests": {}}, r"data.tests\['test.sh'\]: a script"),
        ({"tests": {"test.sh": {"link": "other"}}}, r"data.tests\['test.sh'\]: a script"),
        ({"solution": {"x": "y"}}, r"data.solution\['solve.sh'\]: a script"),
        ({"tests": {"../x": ""}}, r"data.tests\['../x'\]: a relative path without \. and \.\."),
        ({"tests": {"/x": ""}}, "a relative path"),
        ({"tests": {"a//b": ""}}, "a relative path"),
        ({"tests": {"": ""}}, "a relative path"),
        ({"tests": {"a\0": ""}}, "a relative path"),
        ({"tests": {"a": {"link": "/etc"}, "a/passwd": ""}}, "a path that is not below another file"),
        ({"tests": {"a": 1}}, r"data.tests\['a'\]: a string, or an object with text, base64 or link"),
        ({"tests": {"a": {"base64": "?"}}}, "an object with text, base64 or link"),
        ({"tests": {"a": {"text": "x", "mode": 7}}}, "an object with text"),
        ({"tests": {"a": {"text": "x", "executable": 1}}}, "an object with text"),
        ({"tests": {"a": {"text": "x", "link": "y"}}}, "an object with text"),
        ({"workdir": "app"}, "data.workdir: an absolute path"),
        ({"env": {"A": 1}}, r"data.env\['A'\]: a string"),
        ({"keep": ["/"]}, "data.keep: paths other than /, /tests, /logs, /solution"),
        ({"keep": ["/logs/verifier"]}, "data.keep: paths other"),
        ({"keep": ["etc"]}, "data.keep: an absolute path"),
        ({"setup": ["ls"]}, r"data.setup\[0\]: an object with files, or with run"),
        ({"setup": [{"run": "x", "files": {}}]}, r"data.setup\[0\]: an object with files, or with run"),
        ({"setup": [{"run": ""}]}, r"data.setup\[0\].run: a string"),
        ({"setup": [{"run": "x", "cwd": "y"}]}, r"data.setup\[0\].cwd: an absolute path"),
        ({"setup": [{"files": {"..": ""}}]}, r"data.setup\[0\].files\['..'\]: a relative path"),
        ({"setup": [{"run": "x", "user": "y"}]}, r"data.setup\[0\].user: unknown field"),
        ({"colour": "red"}, "data.colour: unknown field"),
    ],
)
def test_data_that_can_never_work_is_refused_with_the_field(change: dict[str, Any], wrong: str):
    with pytest.raises(TaskInvalid, match=wrong):
        check(change)


def test_good_data_passes():
    check({})
    check({"name": "x", "metadata": {"any": [1]}, "notes": ["n"], "keep": ["/etc/nginx"], "workdir": "/x/../y"})


def test_files_are_written_unchanged_and_no_link_is_followed(tmp_path: Path):
    files: dict[str, Any] = {
        "b/c": {"base64": "/wA="},
        "d": {"link": "/etc/hosts"},
        "run": {"text": "é", "executable": True},
    }
    write_files({**files, "test.sh": "x"}, tmp_path, "test.sh")
    assert (tmp_path / "b/c").read_bytes() == b"\xff\0"
    assert (tmp_path / "d").readlink() == Path("/etc/hosts")
    assert (tmp_path / "run").read_text() == "é"
    modes = {name: (tmp_path / name).stat().st_mode & 0o777 for name in ("run", "test.sh", "b/c")}
    assert modes == {"run": 0o755, "test.sh": 0o755, "b/c": 0o644}


@pytest.mark.parametrize(
    ("name", "text", "verdict"),
    [
        ("reward.txt", b" 0.5\n", {"reward": 0.5}),
        ("reward.txt", b"-3", {"reward": -3.0}),
        ("reward.txt", b"", None),
        ("reward.txt", b"yes", None),
        ("reward.txt", b"inf", None),
        ("reward.txt", b"\xff", None),
        ("reward.json", b"1", {"reward": 1.0}),
        ("reward.json", b"true", {"reward": 1.0}),
        ("reward.json", b'{"reward": 1, "a": 0.5, "b": "c"}', {"reward": 1.0, "a": 0.5}),
        ("reward.json", b'{"correct": 1}', {"reward": 1.0}),
        ("reward.json", b'{"a": 1, "b": 0}', None),
        ("reward.json", b'{"reward": NaN}', None),
        ("reward.json", b'{"reward": "1"}', None),
        ("reward.json", b"[1]", None),
        ("reward.json", b"{", None),
        ("reward.json", b"1" + b"0" * 400, None),
        ("reward.json", b"[" * 100_000, None),
    ],
)
def test_a_verdict_needs_a_finite_reward(name: str, text: bytes, verdict: dict[str, float] | None):
    assert parse_verdict(name, text) == verdict


def test_a_task_without_an_image_is_refused(tmp_path: Path):
    body = imported(write(tmp_path))
    del body["sandbox"]["image"]
    with pytest.raises(TaskInvalid, match=r"sandbox.image: a Harbor task needs an image"):
        HarborEnvironment().check(to_play(body, "bubblewrap"))


def test_tasks_that_differ_only_in_tests_share_a_set_up(tmp_path: Path):
    one, two = imported(write(tmp_path)), imported(write(tmp_path, {"tests/test.sh": "exit 0"}))
    key = HarborEnvironment().layer_key
    assert key(to_play(one, "bubblewrap")) == key(to_play(two, "bubblewrap")) is not None
    two["data"]["env"] = {"A": "b"}
    assert key(to_play(one, "bubblewrap")) != key(to_play(two, "bubblewrap"))
