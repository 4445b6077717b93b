"""The data of a `harbor` task, parsed. The importer (`folder.py`) writes it; it may also be written by hand.

{"instruction": "…", "workdir": "/app", "env": {…},
 "setup": [{"files": {"app/main.py": "…"}}, {"run": "make", "cwd": "/app"}],
 "tests": {"test.sh": "…"}, "verifier_env": {…},
 "solution": {"solve.sh": "…"}, "solution_env": {…},
 "keep": ["/etc/nginx"], "name": "…", "metadata": {…}, "notes": ["…"]}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from posixpath import commonpath, isabs, normpath

from rollyard.core import DataField, Task
from rollyard.envs.fields import Fields
from rollyard.envs.harbor.files import Files, check_files, text_of

APP = "/app"
"""The working folder of Harbor tasks if they do not set one."""

RESERVED_FOLDERS = ("/tests", "/logs", "/solution")
"""Folders of the verifier and the oracle. They never contain files of RUN."""

ABOVE_TESTS = (
    *("/conftest.py", "/pytest.ini", "/.pytest.ini", "/pytest.toml", "/.pytest.toml"),
    *("/pyproject.toml", "/tox.ini", "/setup.cfg", "/setup.py", "/node_modules"),
)
"""Files that pytest and node read above /tests by themselves: an agent's /conftest.py could make every test pass. If
the task's working folder is /, they are part of the task."""


FIELDS = (
    DataField("instruction", "string", "What the agent is asked to do."),
    DataField("workdir", "string", "The working folder of the agent, an absolute path.", f'"{APP}"'),
    DataField("env", "object of strings", "Variables of the sandbox.", "{}"),
    DataField("setup", "list of objects", "Steps of the set-up: each has `files`, or a command in `run`.", "[]"),
    DataField("setup[].files", "object of files", "Files by their path from the root."),
    DataField("setup[].run", "string", "A command."),
    DataField("setup[].cwd", "string", "The folder of the command.", '"/"'),
    DataField("setup[].env", "object of strings", "Variables of the command.", "{}"),
    DataField("tests", "object of files", "The verifier's files in /tests; test.sh is run."),
    DataField("verifier_env", "object of strings", "Variables of the verifier.", "{}"),
    DataField("solution", "object of files", "The oracle's files in /solution; solve.sh is run.", "{}"),
    DataField("solution_env", "object of strings", "Variables of the oracle.", "{}"),
    DataField("keep", "list of strings", "Paths of RUN that the verifier gets although they are protected.", "[]"),
    DataField("name", "string", "Its name; not used.", "none"),
    DataField("metadata", "JSON", "Not used.", "none"),
    DataField("notes", "list of strings", "The importer's notes; not used.", "none"),
)


@dataclass(frozen=True, slots=True)
class SetUpStep:
    """A step of the set-up: files with paths from the root, or a command."""

    files: Files
    run: str = ""
    cwd: str = "/"
    env: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True)
class HarborData:
    instruction: str
    workdir: str
    env: Mapping[str, str]
    setup: tuple[SetUpStep, ...]
    tests: Files
    verifier_env: Mapping[str, str]
    solution: Files
    solution_env: Mapping[str, str]
    keep: tuple[str, ...]

    @classmethod
    def read(cls, task: Task) -> HarborData:
        """Parses the data. Raises TaskInvalid with the field that is wrong."""
        fields = Fields(task)
        data = cls(
            instruction=fields.text("instruction"),
            workdir=_folder(fields, "workdir", fields.optional_text("workdir") or APP),
            env=fields.text_map("env"),
            setup=_setup(task, fields),
            tests=check_files(fields, "tests", fields.get("tests")),
            verifier_env=fields.text_map("verifier_env"),
            solution=check_files(fields, "solution", fields.get("solution") or {}),
            solution_env=fields.text_map("solution_env"),
            keep=tuple(_keep_path(fields, path) for path in fields.texts("keep")),
        )
        for unused in ("name", "metadata", "notes"):  # informational: not used
            fields.get(unused)
        fields.done()
        if not text_of(data.tests, "test.sh").strip():
            raise fields.wrong("tests['test.sh']", "a script")
        if data.solution and not text_of(data.solution, "solve.sh").strip():
            raise fields.wrong("solution['solve.sh']", "a script")
        return data


def _folder(fields: Fields, name: str, path: str) -> str:
    if not isabs(path) or "\0" in path:
        raise fields.wrong(name, "an absolute path")
    return normpath("/" + path.lstrip("/"))


def _keep_path(fields: Fields, path: str) -> str:
    path = _folder(fields, "keep", path)
    if path == "/" or any(commonpath((path, reserved)) in (path, reserved) for reserved in RESERVED_FOLDERS):
        raise fields.wrong("keep", f"paths other than /, {', '.join(RESERVED_FOLDERS)}")
    return path


def _setup(task: Task, fields: Fields) -> tuple[SetUpStep, ...]:
    steps: list[SetUpStep] = []
    for index, item in enumerate(fields.items("setup")):
        where = f"setup[{index}]"
        if not isinstance(item, Mapping) or ("run" in item) == ("files" in item):
            raise fields.wrong(where, "an object with files, or with run,")
        own = Fields(task, item, f"data.{where}")
        if "files" in item:
            steps.append(SetUpStep(check_files(own, "files", own.get("files"))))
        else:
            cwd = _folder(own, "cwd", own.optional_text("cwd") or "/")
            steps.append(SetUpStep({}, own.text("run"), cwd, own.text_map("env")))
        own.done()
    return tuple(steps)
