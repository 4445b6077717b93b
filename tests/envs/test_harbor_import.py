"""Converts task folders to bodies: what is imported, what is noted, what is refused and why."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rollyard.core.failure import TaskInvalid
from rollyard.envs.harbor import HarborEnvironment
from rollyard.envs.harbor.files import MOST_BYTES
from rollyard.envs.harbor.scripts import fetching_line, interpreter_of

from .harbor_folders import SOLVE, TEST, TOML, imported, write
from .stage_resources import to_play

NO_IMAGE = TOML.replace("docker_image", "# docker_image")


def test_a_body_contains_the_whole_task(tmp_path: Path):
    body = imported(write(tmp_path / "hello"))
    assert body == {
        "environment": "harbor",
        "data": {
            "name": "hello",
            "instruction": "Write 'Hello, world!' to hello.txt.\n",
            "workdir": "/app",
            "tests": {"test.sh": TEST},
            "solution": {"solve.sh": SOLVE},
            "metadata": {"author_name": "An Author", "difficulty": "easy", "tags": ["trivial"]},
            "notes": ["the image's own working folder is not known: the task starts in /app (--set workdir=PATH)"],
        },
        "limits": {"eval_s": 150.0, "run_s": 90.0},
        "sandbox": {
            "image": "docker://some-org/some-name:some-tag",
            "cpus": 1.0,
            "memory_bytes": 2 << 30,
            "disk_bytes": 10 << 30,
        },
    }
    HarborEnvironment().check(to_play(body, "bubblewrap"))


def test_missing_keys_of_task_toml_have_harbors_defaults(tmp_path: Path):
    body = imported(write(tmp_path, {"task.toml": '[environment]\ndocker_image = "x"\n'}))
    assert body["limits"] == {"eval_s": 630.0}
    assert body["sandbox"] == {
        "image": "docker://x",
        "cpus": 1.0,
        "memory_bytes": 2048 << 20,
        "disk_bytes": 10240 << 20,
    }
    note = "task.toml does not mention a network; Harbor would allow one, here the sandbox is offline"
    assert note in body["data"]["notes"]


def test_sizes_in_the_older_format_are_read(tmp_path: Path):
    toml = TOML.replace("memory_mb = 2048", 'memory = "4G"').replace("storage_mb = 10240", 'storage = "512 MiB"')
    body = imported(write(tmp_path, {"task.toml": toml}))
    assert (body["sandbox"]["memory_bytes"], body["sandbox"]["disk_bytes"]) == (4 << 30, 512 << 20)


def test_unknown_keys_are_noted_and_values_without_a_json_form_become_text(tmp_path: Path):
    toml = f'colour = "red"\n{TOML}skills_dir = "x"\n'.replace(
        "[metadata]", "[metadata]\nmade = 2026-01-02\nscore = nan"
    )
    data = imported(write(tmp_path, {"task.toml": toml}))["data"]
    assert data["notes"][:2] == ["task.toml: colour is not used", "task.toml: environment.skills_dir is not used"]
    assert (data["metadata"]["made"], data["metadata"]["score"]) == ("2026-01-02", "NaN")


def test_files_keep_their_content_links_and_executable_bit(tmp_path: Path):
    write(tmp_path, {"tests/data/x.bin": b"\xff\0", "tests/run": "#!/bin/sh\n", "tests/raw": b"\xfe"})
    for name in ("run", "raw"):
        (tmp_path / "tests" / name).chmod(0o755)
    (tmp_path / "tests/data/latest").symlink_to("x.bin")
    (tmp_path / "tests/all").symlink_to("data")
    assert imported(tmp_path)["data"]["tests"] == {
        "test.sh": TEST,
        "run": {"text": "#!/bin/sh\n", "executable": True},
        "raw": {"base64": "/g==", "executable": True},
        "data/x.bin": {"base64": "/wA="},
        "data/latest": {"link": "x.bin"},
        "all": {"link": "data"},
    }


@pytest.mark.parametrize("target", ["/etc/passwd", "../../outside"])
def test_a_link_that_points_outside_its_folder_is_refused(tmp_path: Path, target: str):
    (write(tmp_path / "task") / "tests/out").symlink_to(target)
    with pytest.raises(TaskInvalid, match="task: the link out points outside its folder"):
        imported(tmp_path / "task")


def test_files_beyond_the_size_limit_of_a_task_are_refused(tmp_path: Path):
    half = b"x" * (MOST_BYTES // 2)
    with pytest.raises(TaskInvalid, match=r"have more than 8 MiB in all; .* larger data belongs in the image"):
        imported(write(tmp_path, {"tests/a": half, "solution/b": half}))


def test_images_of_this_machine_are_named_by_a_template(tmp_path: Path):
    dockerfile = "FROM a AS b\nWORKDIR /not/this\nFROM b\nWORKDIR /srv\nWORKDIR x\nRUN <<E\nanything\nE\n"
    write(tmp_path / "parser", {"environment/Dockerfile": dockerfile})
    body = imported(tmp_path / "parser", images="/images/{name}.sif")
    assert body["sandbox"]["image"] == "/images/parser.sif"
    assert body["data"]["workdir"] == "/srv/x", "the only instruction of a Dockerfile that is used with a built image"
    assert imported(tmp_path / "parser", workdir="/else")["data"]["workdir"] == "/else"


def test_a_folder_of_task_folders_becomes_many_tasks(tmp_path: Path):
    for name in ("b", "a", "group/c"):
        write(tmp_path / name, {"tests/fixture/task.toml": "not = a task"})
    bodies = list(HarborEnvironment().from_folder(tmp_path, {}))
    names: list[Any] = [body["data"]["name"] for body in bodies]  # type: ignore[index,call-overload]
    assert names == ["a", "b", "c"]


def test_all_refused_tasks_are_named_and_can_be_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    write(tmp_path / "good")
    for name in ("bad", "worse"):
        write(tmp_path / name, {"instruction.md": " "})
    with pytest.raises(TaskInvalid) as caught:
        list(HarborEnvironment().from_folder(tmp_path, {}))
    assert caught.value.detail == (
        f"harbor: {tmp_path}/bad: instruction.md is empty\n{tmp_path}/worse: instruction.md is empty;"
        " --set refused=skip imports the others"
    )
    with caplog.at_level(logging.WARNING):
        assert imported(tmp_path, refused="skip")["data"]["name"] == "good"
    assert [record.getMessage() for record in caplog.records] == [
        f"task not imported: {tmp_path}/{name}: instruction.md is empty" for name in ("bad", "worse")
    ]
    with pytest.raises(TaskInvalid, match=r"instruction\.md is empty\n"):
        imported(tmp_path / "bad", refused="skip")


def test_a_folder_without_tasks_is_refused(tmp_path: Path):
    with pytest.raises(TaskInvalid, match=r"there is no task.toml in it or below it"):
        imported(tmp_path)


NETWORK = TOML.replace("allow_internet = false\n", "")


@pytest.mark.parametrize(
    ("line", "hosts"),
    [
        ("allow_internet = true", ["*"]),
        ('network_mode = "public"', ["*"]),
        ('network_mode = "allowlist"\nallowed_hosts = ["a.b", "*.c.d"]', ["a.b", "*.c.d"]),
        ('allowed_hosts = ["a.b"]', ["a.b"]),
    ],
)
def test_a_task_that_requests_a_network_gets_its_hosts(tmp_path: Path, line: str, hosts: list[str]):
    write(tmp_path, {"task.toml": f"{NETWORK}{line}\n"})
    assert imported(tmp_path)["sandbox"]["egress"] == {"hosts": hosts, "eval_hosts": hosts}
    to_play(imported(tmp_path), "bubblewrap")
    assert "egress" not in imported(tmp_path, offline="yes")["sandbox"]
    narrowed = imported(tmp_path, network="x.y, z.y:8080")["sandbox"]["egress"]
    assert narrowed == {"hosts": ["x.y", "z.y:8080"], "eval_hosts": ["x.y", "z.y:8080"]}


def test_the_agent_and_the_verifier_can_have_other_hosts_than_the_environment(tmp_path: Path):
    toml = NETWORK.replace("[verifier]", '[verifier]\nnetwork_mode = "allowlist"\nallowed_hosts = ["a.b"]')
    toml = toml.replace("[agent]", '[agent]\nnetwork_mode = "no-network"') + 'network_mode = "public"\n'
    write(tmp_path, {"task.toml": toml})
    assert imported(tmp_path)["sandbox"]["egress"] == {"hosts": [], "eval_hosts": ["a.b"]}
    assert imported(tmp_path, network="x.y")["sandbox"]["egress"] == {"hosts": [], "eval_hosts": ["x.y"]}


@pytest.mark.parametrize("host", ["http://a.b/", "a b", "10.0.0.300"])
def test_invalid_hosts_are_refused(tmp_path: Path, host: str):
    write(tmp_path, {"task.toml": f'{NETWORK}allowed_hosts = ["{host}"]\n'})
    with pytest.raises(TaskInvalid, match=r"task\.toml: allowed_hosts"):
        imported(tmp_path)
    with pytest.raises(TaskInvalid, match="--set network"):
        imported(tmp_path, network=host)


def test_no_network_takes_precedence_over_the_older_key(tmp_path: Path):
    toml = f'{NETWORK}allow_internet = true\nnetwork_mode = "no-network"\n'
    assert imported(write(tmp_path, {"task.toml": toml}))["environment"] == "harbor"


FETCH = "#!/bin/bash\n# apt-get install comment\napt-get update\n"


def test_tests_that_download_something_are_refused_if_task_toml_forbids_a_network(tmp_path: Path):
    write(tmp_path, {"tests/test.sh": FETCH, "solution/solve.sh": "pip install x"})
    with pytest.raises(
        TaskInvalid, match=r"tests/test.sh: 'apt-get update' needs a network.* every rollout would fail"
    ):
        imported(tmp_path)
    notes = imported(tmp_path, offline="yes")["data"]["notes"]
    assert "solution/solve.sh: 'pip install x' needs a network: the oracle may fail" in notes


def test_tests_that_download_something_request_a_network_if_task_toml_does_not_mention_one(tmp_path: Path):
    write(tmp_path, {"task.toml": NETWORK, "tests/test.sh": FETCH})
    body = imported(tmp_path)
    assert body["sandbox"]["egress"] == {"hosts": [], "eval_hosts": ["*"]}
    assert any("here its tests need one" in note for note in body["data"]["notes"])
    assert any("'apt-get update' needs root" in note for note in body["data"]["notes"])
    assert imported(tmp_path, network="a.b")["sandbox"]["egress"] == {"hosts": ["a.b"], "eval_hosts": ["a.b"]}
    assert "egress" not in imported(write(tmp_path / "quiet", {"task.toml": NETWORK}))["sandbox"]


@pytest.mark.parametrize(
    ("line", "fetches"),
    [
        ("apt-get -y install curl", True),
        ("curl -LsSf https://a.b/install.sh | sh", True),
        ("uvx --with pytest==8.4.1 pytest /tests", True),
        ("python -m pip install pytest", True),
        ("git clone https://a.b/c", True),
        ("curl http://localhost:8080/health", False),
        ("wget -q http://127.0.0.1/x", False),
        ("pytest /tests/test_outputs.py", False),
        ("go build ./...", False),
        ("git clone /srv/repo x", False),
        ("  # uvx pytest", False),
    ],
)
def test_lines_that_need_a_network_are_recognized(line: str, fetches: bool):
    assert (fetching_line(f"#!/bin/bash\n{line}\n") is not None) is fetches


@pytest.mark.parametrize(
    ("first", "program"),
    [
        ("#!/bin/bash -e", "/bin/bash"),
        ("#!/usr/bin/env -S A=b python3 -u", "python3"),
        ("echo", "bash"),
        ("#!", "bash"),
    ],
)
def test_the_interpreter_of_a_script_is_recognized(first: str, program: str):
    assert interpreter_of(f"{first}\nx\n") == program


@pytest.mark.parametrize(
    ("toml", "wrong"),
    [
        (TOML.replace("90.0", '"long"'), r"task\.toml: agent\.timeout_sec: Input should be a valid number"),
        (TOML.replace("120.0", "0"), r"verifier\.timeout_sec: Input should be greater than 0"),
        (TOML.replace("cpus = 1", "cpus = true"), r"environment\.cpus: Input should be a valid number"),
        (TOML.replace("2048", "2.5"), r"environment\.memory_mb: Input should be a valid integer"),
        (f'{NETWORK}network_mode = "some"', r"environment\.network_mode: Input should be 'public'"),
        (f"{TOML}env = {{A = 1}}", r"environment\.env\.A: Input should be a valid string"),
        (f'{TOML}memory = "much"', r'environment\.memory: a size such as "4G" was expected'),
        (f'{TOML}storage = "0G"', r'environment\.storage: a size such as "4G" was expected'),
        ("agent = 3", r"agent: Input should be"),
        ("=", r"task\.toml cannot be read: Invalid"),
        (f'{TOML}os = "windows"', "environment.os: only linux is supported, not 'windows'"),
        (f"{TOML}gpus = 1", "environment.gpus: sandboxes have no GPU"),
        (f'{TOML}[[environment.mcp_servers]]\nname = "x"', "environment.mcp_servers: a task cannot define servers"),
        (f'{TOML}[verifier.environment]\ndocker_image = "x"', "a verifier in a container of its own"),
        (TOML.replace("[verifier]", '[verifier]\nenvironment_mode = "separate"'), "a container of its own"),
        (f'{TOML}[[steps]]\nname = "x"', "steps: tasks of several steps are not supported"),
        (
            f'{TOML}env = {{A = "${{HOME}}"}}',
            r"environment\.env: \$\{HOME\} is a variable of the host.*env\.HOME=VALUE",
        ),
        (NO_IMAGE, "there is no image: neither environment.docker_image in task.toml nor environment/Dockerfile"),
    ],
)
def test_an_unsupported_task_toml_is_refused_with_its_key(tmp_path: Path, toml: str, wrong: str):
    with pytest.raises(TaskInvalid, match=wrong):
        imported(write(tmp_path, {"task.toml": toml}))


@pytest.mark.parametrize(
    ("files", "wrong"),
    [
        ({"instruction.md": None}, "instruction.md cannot be read"),
        ({"tests/test.sh": None}, "tests/test.sh: there is none, or it is empty"),
        ({"environment/docker-compose.yaml": "services: {}"}, "services beside the task's own container"),
    ],
)
def test_an_unsupported_folder_is_refused(tmp_path: Path, files: Mapping[str, str | None], wrong: str):
    with pytest.raises(TaskInvalid, match=wrong):
        imported(write(tmp_path, files))


def test_variables_of_the_host_must_be_set_or_have_a_default(tmp_path: Path):
    write(tmp_path, {"task.toml": TOML + 'env = {A = "${KEY}", B = "x-${OTHER:-y}", C = "$plain"}\n'})
    assert imported(tmp_path, env__KEY="k")["data"]["env"] == {"A": "k", "B": "x-y", "C": "$plain"}


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        ({"image": "x"}, "unknown option 'image' of its importer; there are images, keep, network, offline"),
        ({"offline": "ja"}, "option offline: 'yes' or 'no' was expected, not 'ja'"),
        ({"run": "now"}, "option run: 'prepare' or 'refuse' was expected"),
        ({"safe_path": ""}, "option safe_path: 'no' or 'yes' was expected"),
        ({"refused": "all"}, "option refused: 'skip' or 'stop' was expected"),
        ({"keep": "/data:/tests/x"}, r"data\.keep: paths other than /, /tests, /logs, /solution was expected"),
        ({"workdir": "here"}, r"data\.workdir: an absolute path was expected"),
    ],
)
def test_invalid_options_are_refused(tmp_path: Path, options: dict[str, str], wrong: str):
    with pytest.raises(TaskInvalid, match=wrong):
        imported(write(tmp_path), **options)


def dockered(tmp_path: Path, dockerfile: str, **options: str) -> dict[str, Any]:
    files = {"task.toml": NO_IMAGE, "environment/Dockerfile": dockerfile, "environment/a.txt": "a"}
    return imported(write(tmp_path / "Task", files), **options)


@pytest.mark.parametrize(
    ("line", "files"),
    [
        ("WORKDIR /app\nCOPY a.txt .", ["app/a.txt"]),
        ("WORKDIR /app\nCOPY a.txt b.txt", ["app/b.txt"]),
        ("WORKDIR /app\nCOPY a.txt /app", ["app/a.txt"]),
        ("COPY a.txt /x/", ["x/a.txt"]),
        ("COPY a.txt /x", ["x"]),
        ('COPY ["a.txt", "/x y/"]', ["x y/a.txt"]),
        ("COPY *.txt Dockerfile /x", ["x/a.txt", "x/Dockerfile"]),
        ("COPY --chown=1:1 . /x", ["x/Dockerfile", "x/a.txt"]),
        ("COPY . /", ["Dockerfile", "a.txt"]),
        ("COPY\ta.txt \\\n/z", ["z"]),
        ("add a.txt /y", ["y"]),
    ],
)
def test_copy_puts_files_where_a_build_would(tmp_path: Path, line: str, files: list[str]):
    (step,) = dockered(tmp_path, f"FROM x\n{line}\n")["data"]["setup"]
    assert list(step["files"]) == files


def test_variables_of_a_dockerfile_apply_to_the_task(tmp_path: Path):
    text = 'ARG TAG=2\nFROM x:$TAG\nENV A=1 B="two words"\nENV C the rest\nENV D=${A}-$TAG E=\\$A\n'
    text += 'ENTRYPOINT ["x"]\nUSER me\n'
    body = dockered(tmp_path, text)
    assert body["sandbox"]["image"] == "docker://x:2"
    assert body["data"]["env"] == {"A": "1", "B": "two words", "C": "the rest", "D": "1-2", "E": "$A"}
    assert body["data"]["notes"][:2] == [
        "Dockerfile: ENTRYPOINT: an image's entry point is not run",
        "Dockerfile: USER: commands run as the sandbox's own user",
    ]


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("FROM x\n\nRUN make \\\n  all", r"environment/Dockerfile:3: RUN make +all: this needs a build: rollyard images"
         r" build \S*/Task/environment --name task, then import with --set images=\{name\}; or --set run=prepare"),
        ("FROM x\nFROM y", "Dockerfile:2: 'FROM y': more than one stage needs a build"),
        ("FROM scratch", "the name of an image was expected"),
        ("WORKDIR /x", "a Dockerfile must start with FROM"),
        ("# nothing", "there is no FROM"),
        ("FROM x\nENV PATH=/x:$PATH", r"the value of \$PATH is known only in a build"),
        ("FROM x\nENV A=${B:-c}", "this form of a variable needs a build"),
        ("FROM x\nENV A='", "cannot be read: No closing quotation"),
        ("FROM x\nENV A=b c", "NAME=VALUE was expected"),
        ("FROM x\nWORKDIR y", "relative to the working folder of the base image"),
        ("FROM x\nCOPY a.txt .", "the working folder of the base image is not known here"),
        ("FROM x\nCOPY --from=y a /b", "--from=y needs a build"),
        ("FROM x\nCOPY none /b", "there is no 'none' in environment/"),
        ("FROM x\nCOPY ../tests /b", "there is no '../tests' in environment/"),
        ("FROM x\nCOPY a.txt", "a source and a destination were expected"),
        ("FROM x\nCOPY [a /b", "a list of strings was expected"),
        ('FROM x\nCOPY ["a.txt", 3]', "a list of strings was expected"),
        ("FROM x\nCOPY **.txt /b", "is a pattern that needs a build"),
        ("FROM x\nENV =b", "NAME=VALUE was expected"),
        ("FROM x\nCOPY <<E /b\nE", "a heredoc needs a build"),
        ("FROM x\nADD https://a.b/c /d", "ADD of a URL or an archive needs a build"),
        ("FROM x\nADD a.tar.gz /d", "ADD of a URL or an archive needs a build"),
        ("FROM x\nSHELL [\"bash\"]", "this needs a build"),
        ("FROM x\nONBUILD RUN x", "this needs a build"),
        ("FROM x\nFOUND y", "this needs a build"),
    ],
)  # fmt: skip
def test_a_dockerfile_that_needs_a_build_is_refused_with_its_line(tmp_path: Path, text: str, wrong: str):
    with pytest.raises(TaskInvalid, match=wrong):
        dockered(tmp_path, text)


def test_a_link_that_points_outside_the_build_folder_is_not_copied(tmp_path: Path):
    (tmp_path / "secret").write_text("s")
    write(tmp_path / "Task", {"task.toml": NO_IMAGE, "environment/Dockerfile": "FROM x\nCOPY out /b"})
    (tmp_path / "Task/environment/out").symlink_to(tmp_path / "secret")
    with pytest.raises(TaskInvalid, match="there is no 'out' in environment/"):
        imported(tmp_path / "Task")


@pytest.mark.parametrize("name", [".dockerignore", "Dockerfile.dockerignore"])
def test_a_dockerignore_is_refused(tmp_path: Path, name: str):
    dockerfile = "FROM x\nCOPY . /app\n"
    files = {"environment/Dockerfile": dockerfile, f"environment/{name}": "answers", "environment/answers": "42"}
    with pytest.raises(TaskInvalid, match=r"Dockerfile:2: .* a \.dockerignore excludes .* needs a build"):
        imported(write(tmp_path, {"task.toml": NO_IMAGE, **files}))


def test_run_lines_of_a_dockerfile_run_at_set_up_with_the_option(tmp_path: Path):
    text = 'FROM x\nARG N=1 M="2"\nENV M=3\nWORKDIR /w\nRUN make all\nRUN ["echo", "a b"]\n'
    assert dockered(tmp_path, text, run="prepare")["data"]["setup"] == [
        {"run": "make all", "cwd": "/w", "env": {"N": "1"}},
        {"run": "echo 'a b'", "cwd": "/w", "env": {"N": "1"}},
    ]
    fetches = "FROM x\nRUN apt-get update && apt-get install -y vim\n"
    with pytest.raises(TaskInvalid, match=r"Dockerfile:2: RUN apt-get .* needs a network, and the task has none"):
        dockered(tmp_path, fetches, run="prepare")
    toml = NO_IMAGE.replace("allow_internet = false", "allow_internet = true")
    networked = {"task.toml": toml, "environment/Dockerfile": fetches}
    with pytest.raises(TaskInvalid, match=r"Dockerfile:2: RUN apt-get .* needs root, which sandboxes do not have"):
        imported(write(tmp_path / "root", networked), run="prepare")
    networked["environment/Dockerfile"] = "FROM x\nRUN pip install y\n"
    assert imported(write(tmp_path / "pip", networked), run="prepare")["data"]["setup"]
    assert dockered(tmp_path, fetches, run="prepare", offline="yes")["data"]["setup"]
    for line in ("RUN --mount=type=cache x", "RUN cat <<E\nE"):
        with pytest.raises(TaskInvalid, match="options and heredocs of RUN need a build"):
            dockered(tmp_path, f"FROM x\n{line}\n", run="prepare")
    with pytest.raises(TaskInvalid, match="a list of strings was expected"):
        dockered(tmp_path, "FROM x\nRUN [ -e /x ]\n", run="prepare")
