"""A task's data, parsed: an unchanged row of SWE-bench, SWE-Gym or R2E-Gym, with Rollyard's options beside its fields.

Only the fields that the score depends on are read. Datasets have many more; unknown fields are stored and ignored.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from posixpath import basename, normpath

from rollyard.core import DataField, Json, Task
from rollyard.envs.fields import Fields
from rollyard.envs.swe.suites import Suite, suite_of

WORKDIR = "/testbed"
"""The repository's path in the images of all three datasets."""

INSTRUCTION = """The repository in {workdir} has the following issue.

<issue>
{problem_statement}
</issue>

Change the source files in {workdir} so that the issue is resolved. Hidden tests decide whether it is: changes to \
existing tests and new tests are not counted. Leave your changes in the files; you need not commit them."""

START = ">>>>> Start Test Output"
END = ">>>>> End Test Output"
"""What swebench's eval scripts print before and after the tests."""

RUNNER_FILES = frozenset(
    {"conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini", "setup.cfg"}
    | {"pyproject.toml", "sitecustomize.py", "usercustomize.py"}
)
"""Files that decide how tests run, in any folder and independent of the code. Packages are not installed again, so
changing these files fixes nothing; a change is not part of a solution unless the row's own patch has a file of that
name."""

RUNNER_PATTERNS = ("*.pth", "*.egg-info/*", "*.dist-info/*", ".venv/*", "pytest.py", "pytest/*", "_pytest/*")
"""The same, by path: start-up files, metadata of pytest plug-ins, another pytest in the folder in which pytest is
started, and R2E-Gym's Python. Unless the row's own patch has a matching file."""

R2E_TESTS = ("r2e_tests", "run_tests.sh")
"""In an R2E-Gym image's repository: the hidden tests and the script that runs them. The tests are also at the root."""

R2E_ANSWERS = (
    "execution_result.json",
    "expected_test_output.json",
    "modified_entities.json",
    "modified_files.json",
    "parsed_commit.json",
    "syn_issue.json",
)
"""Files beside them in some of these images: the commit with the fix, and what the tests print with it."""

R2E_COMMAND = "[ -e r2e_tests ] || ln -s /r2e_tests r2e_tests; bash run_tests.sh"

_FILES = re.compile(r"^(?:diff --git a/(.+) b/(.+)|(?:rename|copy) (?:from|to) (.+))$", re.MULTILINE)
_ISSUE = re.compile(r"\[ISSUE\](.*)\[/ISSUE\]", re.DOTALL)
_NO_TESTS = (".json", ".png", "csv", ".txt", ".md", ".jpg", ".jpeg", ".pkl", ".yml", ".yaml", ".toml")
"""Data files of a test patch. Like swebench, do not pass them to the test command."""


FIELDS = (
    DataField("repo", "string", "The repository's name; R2E-Gym: `repo_name`."),
    DataField("repo_name", "string", "R2E-Gym: the repository's name.", "none"),
    DataField("version", "string", "The repository's version, which selects the test command.", '""'),
    DataField("instance_id", "string", "The row's id.", "`commit_hash`, else the repository"),
    DataField("commit_hash", "string", "R2E-Gym: the row's id.", "none"),
    DataField("problem_statement", "string", "The issue."),
    DataField("hints_text", "string", "Comments on the issue, {hints_text} in the template.", '""'),
    DataField("instruction", "string", "Template of the first message, with {problem_statement}.", "the environment's"),
    DataField("system_prompt", "string or null", "The system message.", "null"),
    DataField("patch", "string", "The reference solution, for the oracle.", '""'),
    DataField("modified_files", "list, or one in JSON", "R2E-Gym: the files that the solution changes.", "the patch's"),
    DataField("test_patch", "string", "Applied in EVAL, after the solution.", '""'),
    DataField("FAIL_TO_PASS", "list, or one in JSON", "Tests that must pass after the change."),
    DataField("PASS_TO_PASS", "list, or one in JSON", "Tests that must still pass."),
    DataField("expected_output_json", "object, or one in JSON", "R2E-Gym: outcomes of the tests, instead.", "none"),
    DataField("eval_script", "string", "A script of swebench that runs the tests.", '""'),
    DataField("test_command", "string", "Runs the tests, for a repository that is not a known suite.", "the suite's"),
    DataField("log_parser", "string", "One of swebench's parsers of the tests' output.", "the suite's"),
    DataField("eval_type", "pass_and_fail or fail_only", "Which tests decide, as in newer SWE-bench rows.", '""'),
    DataField("workdir", "string", "The repository in the image, an absolute path.", f'"{WORKDIR}"'),
    DataField("env", "object of strings", "Variables of the sandbox.", "{}"),
)
"""What is read. Other fields of a row are ignored."""


@dataclass(frozen=True, slots=True)
class SweData:
    """A row, parsed. `expected` is R2E-Gym's; if present, it alone decides the verdict."""

    instance_id: str
    repo: str
    version: str
    problem_statement: str
    hints_text: str
    patch: str
    fixed_files: tuple[str, ...]  # by the patch, or as listed in the row
    test_patch: str
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    expected: Mapping[str, str] | None
    eval_script: str
    test_command: str
    log_parser: str
    runner_files: tuple[str, ...]  # of this repository only
    eval_type: str
    workdir: str
    system_prompt: str | None
    instruction: str
    env: Mapping[str, str] = field(default_factory=dict[str, str])

    @classmethod
    def read(cls, task: Task) -> SweData:
        """Parses the data. Raises TaskInvalid with the field that is wrong."""
        fields = Fields(task)
        is_r2e = fields.get("expected_output_json") is not None
        repo = fields.text("repo_name" if is_r2e else "repo")
        version = str(fields.get("version") or "")
        known = Suite(R2E_COMMAND, "parse_log_pytest_v2") if is_r2e else suite_of(repo, version) or Suite("", "")
        statement = fields.text("problem_statement")
        issue = _ISSUE.search(statement) if is_r2e else None
        data = cls(
            instance_id=fields.optional_text("instance_id") or fields.optional_text("commit_hash") or repo,
            repo=repo,
            version=version,
            problem_statement=issue[1].strip() if issue else statement,
            hints_text=fields.optional_text("hints_text") or "",
            patch=_patch(fields, "patch"),
            fixed_files=touched(_patch(fields, "patch")) or _modified(fields),
            test_patch=_patch(fields, "test_patch"),
            fail_to_pass=() if is_r2e else _tests(fields, "FAIL_TO_PASS"),
            pass_to_pass=() if is_r2e else _tests(fields, "PASS_TO_PASS"),
            expected=_expected(fields) if is_r2e else None,
            eval_script=_eval_script(fields),
            test_command=fields.optional_text("test_command") or "",
            log_parser=fields.optional_text("log_parser") or known.log_parser,
            runner_files=known.runner_files,
            eval_type=_eval_type(fields),
            workdir=_workdir(fields),
            system_prompt=fields.optional_text("system_prompt"),
            instruction=_instruction(fields),
            env=fields.text_map("env"),
        )
        if not is_r2e and not data.fail_to_pass:
            raise fields.wrong("FAIL_TO_PASS", "at least one test")
        if data.test_command or data.eval_script:
            if not data.log_parser:
                raise fields.wrong("log_parser", "the name of one of swebench's parsers, such as parse_log_pytest,")
            return data
        if not known.test_command:
            what = f"{repo} at version {version!r}" if version else repo
            raise fields.wrong("test_command", f"how to run the tests of {what}, which is not a known suite,")
        return replace(data, test_command=known.test_command)

    @property
    def is_r2e(self) -> bool:
        return self.expected is not None

    @property
    def has_own_script(self) -> bool:
        """Whether the row's `eval_script` is used: it applies the test patch itself."""
        return bool(self.eval_script) and not self.test_command

    @property
    def test_files(self) -> tuple[str, ...]:
        """The files that the test patch changes; without a patch, the files of the tests in the image."""
        if self.test_patch or self.has_own_script:
            return touched(self.test_patch)
        tests = (*self.fail_to_pass, *self.pass_to_pass)
        files = dict.fromkeys(test.partition("::")[0] for test in tests if "::" in test)
        return tuple(file for file in files if file not in self.fixed_files)

    @property
    def excluded_patterns(self) -> tuple[str, ...]:
        """Patterns of files that are not part of a solution: they belong to the tests or decide how tests run."""
        fixed = {basename(path) for path in self.fixed_files}
        patterns = [re.sub(r"([\\*?\[])", r"\\\1", path) for path in self.test_files]
        patterns += [pattern for name in sorted(RUNNER_FILES - fixed) for pattern in (name, f"*/{name}")]
        patterns += [
            pattern
            for pattern in (*RUNNER_PATTERNS, *self.runner_files)
            if not any(fnmatchcase(path, pattern) for path in self.fixed_files)
        ]
        if self.is_r2e:
            patterns += [pattern for name in R2E_TESTS for pattern in (name, f"{name}/*")]
        return tuple(patterns)

    def first_message(self) -> str:
        """The first message. It does not use `format`, because issues are full of braces."""
        places = {
            "problem_statement": self.problem_statement,
            "hints_text": self.hints_text,
            "workdir": self.workdir,
            "repo": self.repo,
        }
        return re.sub(r"\{(\w+)\}", lambda match: places.get(match[1], match[0]), self.instruction)

    def tests_to_run(self) -> str:
        """The command, with {test_files} replaced by the files of the test patch."""
        files = [path for path in _files_after(self.test_patch) if not path.endswith(_NO_TESTS)]
        if self.repo == "django/django":  # its runner expects modules below tests/
            files = [path.removeprefix("tests/").removesuffix(".py").replace("/", ".") for path in files]
        return self.test_command.replace("{test_files}", shlex.join(files))


def touched(patch: str) -> tuple[str, ...]:
    """The files that a patch names, old and new."""
    names = (name for match in _FILES.finditer(patch) for name in match.groups() if name)
    return tuple(dict.fromkeys(name.rstrip("\r") for name in names))


def _files_after(patch: str) -> list[str]:
    """The files that exist after the patch: a runner runs nothing if it gets a missing file."""
    parts = re.split(r"^(?=diff --git )", patch, flags=re.MULTILINE)
    names = [(_FILES.match(part), part) for part in parts]
    is_deleted = re.compile(r"^deleted file mode", re.MULTILINE)
    return [name[2].rstrip("\r") for name, part in names if name and name[2] and not is_deleted.search(part)]


def _patch(fields: Fields, name: str) -> str:
    """Adds the final line break that some datasets have removed: git rejects a patch without it."""
    text = fields.optional_text(name) or ""
    return text + "\n" if text.strip() and not text.endswith("\n") else text


def _tests(fields: Fields, name: str) -> tuple[str, ...]:
    """SWE-bench has a JSON string here, SWE-Gym a list."""
    value = _from_json(fields, name)
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
        raise fields.wrong(name, "a list of tests, or one in JSON,")
    return tuple(str(item) for item in value)


def _modified(fields: Fields) -> tuple[str, ...]:
    """R2E-Gym's list of the files that the fix changed. Optional."""
    value = _from_json(fields, "modified_files")
    return tuple(item for item in value if isinstance(item, str)) if isinstance(value, list | tuple) else ()


def _expected(fields: Fields) -> dict[str, str]:
    value = _from_json(fields, "expected_output_json")
    if not isinstance(value, Mapping) or not value or not all(isinstance(item, str) for item in value.values()):
        raise fields.wrong("expected_output_json", "an object of tests and their outcomes, or one in JSON,")
    return {str(key): str(item) for key, item in value.items()}


def _from_json(fields: Fields, name: str) -> Json:
    value = fields.get(name)
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return None


def _eval_script(fields: Fields) -> str:
    script = fields.optional_text("eval_script") or ""
    marks = [mark for line in script.splitlines() for mark in (START, END) if mark in line]
    if script and marks != [START, END]:
        raise fields.wrong("eval_script", f"a swebench script that contains {START!r} and {END!r}")
    return script


def _eval_type(fields: Fields) -> str:
    kind = fields.optional_text("eval_type") or ""
    if kind not in ("", "pass_and_fail", "fail_only"):
        raise fields.wrong("eval_type", '"pass_and_fail" or "fail_only"')
    return kind


def _workdir(fields: Fields) -> str:
    workdir = fields.optional_text("workdir") or WORKDIR
    if not workdir.startswith("/") or normpath(workdir) == "/":
        raise fields.wrong("workdir", "the absolute path of a repository in the image")
    return normpath(workdir)


def _instruction(fields: Fields) -> str:
    text = fields.optional_text("instruction") or INSTRUCTION
    if "{problem_statement}" not in text:
        raise fields.wrong("instruction", "a string that contains {problem_statement}")
    return text
