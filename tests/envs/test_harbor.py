"""Imports Harbor task folders and runs them in real sandboxes, also with agents that try to write their own verdict."""

import errno
import json
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from rollyard.core.failure import EgressNotAllowed
from rollyard.pipeline import StageResources
from tests.sandbox.egress.site import served

from .harbor_folders import SOLVE, TEST, TOML, imported, local, ready, write
from .stage_resources import RUNTIMES, open_resources, played, rewards

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def resources() -> AsyncGenerator[StageResources, None]:
    """Shared by all tests that need no other runtime: opening it takes longer than a task."""
    async with open_resources("bubblewrap") as opened:
        yield opened


SEVERAL = """\
#!/usr/bin/env bash
cat > /logs/verifier/reward.json <<EOF
{"reward": $(test -s /app/hello.txt && echo 0.75 || echo 0), "style": 0.5, "said": "well done"}
EOF
"""


async def score_of(resources: StageResources, body: dict[str, Any], agent: str = "oracle"):
    result = await played(resources, body, agent)
    assert result.score is not None, result.failure
    return result.score


@pytest.mark.parametrize("runtime", RUNTIMES)
async def test_a_task_folder_runs_unchanged(tmp_path: Path, runtime: str):
    body = local(imported(write(tmp_path / "hello")), is_sif=runtime == "apptainer")
    async with open_resources(runtime) as resources:
        assert await rewards(resources, body) == (1.0, 0.0)


@pytest.mark.parametrize("runtime", RUNTIMES)
async def test_reward_json_contains_the_reward_and_its_components(tmp_path: Path, runtime: str):
    body = ready(tmp_path, {"tests/test.sh": SEVERAL})
    async with open_resources(runtime) as resources:
        score = await score_of(resources, body)
        assert (score.reward, score.components) == (0.75, {"style": 0.5})
        assert score.metrics == {"verifier_ran": 1.0, "verifier_status": 0.0, "reward_written": 1.0}
        nothing = await played(resources, body, "noop")
        assert nothing.score is not None and nothing.score.reward == 0.0
        (tests,) = json.loads(nothing.evidence)
        assert (tests["kind"], tests["name"], tests["passed"]) == ("tests", "tests/test.sh", False)


DOCKERFILE = """\
# syntax=docker/dockerfile:1
FROM some/base:1.0 AS base
ARG WHO=world
ENV GREETING="Hello" NAME=$WHO
WORKDIR /srv
WORKDIR place
COPY greet.py data/ ./
COPY one.txt /srv/renamed
RUN python3 greet.py \\
    # a comment in between
    && cp greeting.txt /srv/greeting && echo $WHO > who
CMD ["bash"]
"""

DOCKERED = """\
#!/bin/bash
cd /srv/place
[ "$(cat /srv/renamed who ../place/inner/deep.txt)" = "$(printf 'one\\nworld\\ndeep')" ] || exit 1
[ "$PWD" = /srv/place ] && [ "$GREETING" = Hello ] || exit 1
diff answer /srv/greeting && echo 1.0 > /logs/verifier/reward.txt
"""


async def test_a_dockerfile_is_applied_without_a_build(resources: StageResources, tmp_path: Path):
    files = {
        "task.toml": TOML.replace("docker_image", "# docker_image"),
        "environment/Dockerfile": DOCKERFILE,
        "environment/greet.py": "import os\nopen('greeting.txt', 'w').write(os.environ['GREETING'])\n",
        "environment/data/inner/deep.txt": "deep\n",
        "environment/one.txt": "one\n",
        "tests/test.sh": DOCKERED,
        "solution/solve.sh": "cat /srv/greeting > answer",  # no shebang line: run with bash, in the working folder
    }
    body = imported(write(tmp_path, files), run="prepare")
    assert body["sandbox"]["image"] == "docker://some/base:1.0"
    assert body["data"]["workdir"] == "/srv/place"
    assert await rewards(resources, local(body)) == (1.0, 0.0)


async def test_variables_reach_only_the_commands_that_they_are_for(resources: StageResources, tmp_path: Path):
    toml = TOML + 'env = {FOR_ALL = "a"}\n[solution]\nenv = {FOR_ORACLE = "o"}\n'
    toml = toml.replace("[verifier]\n", '[verifier]\nenv = {FOR_TESTS = "${SECRET}"}\n')
    files = {
        "task.toml": toml,
        "solution/solve.sh": "#!/bin/sh\necho $FOR_ALL$FOR_ORACLE$FOR_TESTS > seen; ls /tests > there 2>/dev/null",
        "tests/test.sh": "#!/bin/sh\n[ $(cat seen)$FOR_TESTS$FOR_ORACLE$FOR_ALL = aosa ] && [ ! -s there ]"
        " && [ ! -e /solution/solve.sh ] && echo 1 > /logs/verifier/reward.txt",
    }
    assert await rewards(resources, ready(tmp_path, files, env__SECRET="s")) == (1.0, 0.0)


async def test_the_folders_of_the_format_exist_for_the_agent(resources: StageResources, tmp_path: Path):
    solve = "touch /logs/agent/a /logs/verifier/b && pwd > where"
    test = f"#!/bin/bash\n[ $(cat /app/where) = /app ] && [ ! -e /logs/verifier/b ] && {FORGE}"
    assert await rewards(resources, ready(tmp_path, {"solution/solve.sh": solve, "tests/test.sh": test})) == (1.0, 0.0)


FORGE = "echo 1 > /logs/verifier/reward.txt"
CHEATS = {
    "the reward, written before": FORGE,
    "the reward, as json": "echo 1 > /logs/verifier/reward.json",
    "the reward, unwritable": f"{FORGE}; chmod 444 /logs/verifier/reward.txt; chmod 555 /logs/verifier /logs",
    "tests of its own": "mkdir -p /tests; printf '#!/bin/sh\\necho 1 > /logs/verifier/reward.txt' > /tests/test.sh;"
    " chmod -R 555 /tests",
    "a link in place of /tests": "mkdir evil; echo 'echo 1 > /logs/verifier/reward.txt' > evil/test.sh;"
    " rm -rf /tests; ln -s /app/evil /tests",
    "a link in place of /logs": f"{FORGE}; mv /logs /app/logs; ln -s /app/logs /logs",
    "bash itself": "printf '#!/bin/sh\\necho 1 > /logs/verifier/reward.txt\\n' > evil; chmod +x evil;"
    " rm /usr/bin/bash /usr/bin/grep; cp evil /usr/bin/bash; cp evil /usr/bin/grep",
    "its own working folder gone": "rm -rf /app",
    "its own working folder elsewhere": "rm -rf /app; ln -s /logs/verifier /app",
    "the root, shut": f"{FORGE}; chmod 0 /logs/verifier /logs /",
    "a process that keeps running": "setsid -f sh -c 'while :; do echo 1 > /logs/verifier/reward.txt; done'",
}


@pytest.mark.parametrize("runtime", RUNTIMES)
async def test_an_agent_cannot_write_its_own_verdict(tmp_path: Path, runtime: str):
    cheats = list(CHEATS.items())[:: 1 if runtime == "bubblewrap" else 3]  # both use the same kind of overlay
    async with open_resources(runtime) as resources:
        for number, (name, attack) in enumerate(cheats):
            body = ready(tmp_path / str(number), {"solution/solve.sh": f"#!/bin/sh\n{attack}\n"})
            assert (await score_of(resources, body)).reward == 0.0, name


RUNS_IT = "#!/bin/bash\npython3 /app/main.py\n" + TEST.partition("\n")[2]
"""Like most tests, it runs the agent's program."""

PROGRAMS = {
    "a process that writes it again and again": "import subprocess\nsubprocess.Popen(['setsid', 'sh', '-c', '(while :;"
    " do echo 1 > /app/y; mv /app/y /logs/verifier/reward.txt; done) &'])\n",
    "a reward.json, which the tests do not speak of": "open('/logs/verifier/reward.json', 'w').write('1')\n",
    "a reward that the tests cannot replace": "import os\nopen('/logs/verifier/reward.txt', 'w').write('1')\n"
    "os.chmod('/logs/verifier/reward.txt', 0o444)\n",
    "a folder that the tests cannot write to": "import os\nopen('/logs/verifier/reward.txt', 'w').write('1')\n"
    "os.chmod('/logs/verifier/reward.txt', 0o444)\nos.chmod('/logs/verifier', 0o555)\n",
}


ABOVE = """\
#!/bin/bash
for name in conftest.py pytest.ini pyproject.toml setup.cfg tox.ini node_modules; do
  [ -e /$name ] && echo 1 > /logs/verifier/reward.txt
done
[ -e /setup.py ] && [ -e /kept.txt ] && echo 0.5 > /logs/verifier/reward.txt
"""


async def test_files_that_runners_read_above_the_tests_are_not_the_agents(resources: StageResources, tmp_path: Path):
    plant = "for name in conftest.py pytest.ini pyproject.toml setup.cfg tox.ini kept.txt; do echo x > /$name; done\n"
    body = ready(tmp_path, {"tests/test.sh": ABOVE, "solution/solve.sh": f"{plant}mkdir /node_modules; rm /setup.py"})
    body["data"]["setup"] = [{"files": {"setup.py": "the image's own"}}]
    assert (await score_of(resources, body)).reward == 0.5
    body["data"]["workdir"] = "/"
    assert (await score_of(resources, body)).reward == 1.0, "in /, they are part of the task"


async def test_a_program_that_the_tests_run_cannot_easily_forge_the_verdict(resources: StageResources, tmp_path: Path):
    for number, (name, program) in enumerate(PROGRAMS.items()):
        solve = f"cat > main.py <<'EOF'\n{program}EOF\n"
        body = ready(tmp_path / str(number), {"tests/test.sh": RUNS_IT, "solution/solve.sh": solve})
        assert (await score_of(resources, body)).reward == 0.0, name


IMPORTS = "#!/bin/bash\npython3 -c 'import json, sys; sys.exit(1)' && echo 1 > /logs/verifier/reward.txt\n"


async def test_python_imports_from_the_tests_and_not_from_the_agents_folder(resources: StageResources, tmp_path: Path):
    planted = {"solution/solve.sh": "echo 'raise SystemExit(0)' > json.py", "tests/test.sh": IMPORTS}
    own = {
        "tests/test.sh": "#!/bin/bash\npython3 /tests/main.py",
        "tests/main.py": "import beside",
        "tests/beside.py": "",
    }
    own["tests/beside.py"] = "open('/logs/verifier/reward.txt', 'w').write('1')"
    assert (await score_of(resources, ready(tmp_path / "a", planted))).reward == 0.0
    assert (await score_of(resources, ready(tmp_path / "b", own))).reward == 1.0
    loose = ready(tmp_path / "a", planted, safe_path="no")
    assert (await score_of(resources, loose)).reward == 1.0, "with safe_path=no, Python imports as usual"


KEEPING = {
    "tests/test.sh": "#!/bin/bash\nif grep -qx 'mode fast' /etc/tool/conf.d/x && [ ! -e /etc/tool/old ]\nthen"
    " echo 1 > /logs/verifier/reward.txt; fi\n",
    "solution/solve.sh": "mkdir -p /etc/tool/conf.d; echo 'mode fast' > /etc/tool/conf.d/x; rm -f /etc/tool/old\n",
}


@pytest.mark.parametrize("runtime", RUNTIMES)
async def test_changes_to_the_system_are_scored_if_the_task_keeps_their_paths(tmp_path: Path, runtime: str):
    preserved, lost = ready(tmp_path, KEEPING, keep="/etc/tool:/etc/none"), ready(tmp_path, KEEPING)
    for body in (preserved, lost):
        body["data"]["setup"] = [{"files": {"etc/tool/old": "x"}}]
    async with open_resources(runtime) as resources:
        assert await rewards(resources, preserved) == (1.0, 0.0)
        assert await rewards(resources, lost) == (0.0, 0.0)


@pytest.mark.parametrize(
    "test",
    [
        "exit 1",
        "echo '' > /logs/verifier/reward.txt",
        "echo nan > /logs/verifier/reward.txt",
        "mkdir /logs/verifier/reward.txt",
    ],
    ids=["none", "empty", "no number", "a folder"],
)
async def test_a_verifier_that_writes_no_reward_scores_0(resources: StageResources, tmp_path: Path, test: str):
    body = ready(tmp_path, {"tests/test.sh": f"#!/bin/sh\n{test}\n"})
    score = await score_of(resources, body)
    assert (score.reward, score.metrics["reward_written"]) == (0.0, 0.0)


async def test_files_of_the_image_in_the_verifiers_folders_are_ignored(resources: StageResources, tmp_path: Path):
    body = ready(tmp_path, {"tests/test.sh": "#!/bin/sh\ntest -e /tests/planted && echo 1 > /logs/verifier/reward.txt"})
    body["data"]["setup"] = [{"files": {"logs/verifier/reward.txt": "1", "tests/planted": ""}}]
    assert (await score_of(resources, body, "noop")).metrics["reward_written"] == 0.0


async def test_files_of_run_that_prevent_the_verifier_from_starting_score_0(resources: StageResources, tmp_path: Path):
    solve = "mkdir -p /data/x; touch /data/x/y; chmod 555 /data/x /data"
    body = ready(tmp_path, {"solution/solve.sh": solve}, keep="/data/x")
    assert (await score_of(resources, body)).metrics == {"verifier_ran": 0.0, "reward_written": 0.0}


async def test_kept_files_do_not_reach_the_tests_through_a_link(resources: StageResources, tmp_path: Path):
    solve = "mkdir -p /data; rm -rf /tests; ln -s / /data/x; mkdir /tests; touch /tests/planted"
    test = "#!/bin/sh\ntest -e /tests/planted && echo 1 > /logs/verifier/reward.txt"
    body = ready(tmp_path, {"solution/solve.sh": solve, "tests/test.sh": test}, keep="/data/x/tests")
    assert (await score_of(resources, body)).metrics["reward_written"] == 0.0


async def test_a_host_that_cannot_write_the_tests_is_not_the_policys_fault(
    resources: StageResources, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    body = ready(tmp_path)
    monkeypatch.setattr("rollyard.envs.harbor.environment.write_files", full)
    result = await played(resources, body, "noop")
    assert result.score is None
    assert result.failure is not None and result.failure.code == "verifier_crashed"


async def test_tests_that_exceed_the_time_limit_are_the_policys_fault(resources: StageResources, tmp_path: Path):
    body = ready(tmp_path, {"tests/test.sh": "#!/bin/sh\nsleep 600\n"})
    body["limits"]["eval_s"] = 8.0
    result = await played(resources, body, "noop")
    assert result.failure is not None and result.failure.code == "eval_deadline"


@pytest.mark.parametrize(
    ("change", "detail"),
    [
        (
            {"setup": [{"run": "echo broken >&2; exit 3"}]},
            "'echo broken >&2; exit 3' ended with status 3: broken",
        ),
        ({"tests": {"test.sh": "#!/usr/bin/env fish\n"}}, "run by fish, which the image does not have"),
    ],
    ids=["a command fails", "no interpreter"],
)
async def test_a_failed_set_up_is_reported_with_the_reason(
    resources: StageResources, tmp_path: Path, change: Any, detail: str
):
    body = ready(tmp_path)
    body["data"] |= change
    result = await played(resources, body, "noop")
    assert result.failure is not None
    assert result.failure.code == "setup_failed"
    assert detail in result.failure.detail


async def test_a_set_up_that_hangs_is_ended(resources: StageResources, tmp_path: Path):
    body = ready(tmp_path)
    body["data"]["setup"] = [{"run": "sleep 600"}]
    body["limits"]["init_s"] = 4.0
    result = await played(resources, body, "noop")
    assert result.failure is not None and result.failure.code == "setup_deadline"


async def test_without_a_solution_there_is_no_oracle(resources: StageResources, tmp_path: Path):
    body = ready(tmp_path, {"solution/solve.sh": None})
    result = await played(resources, body, "oracle")
    assert result.failure is not None
    assert "the task has no solution/solve.sh" in result.failure.detail


async def test_the_output_of_the_oracle_is_in_its_messages(resources: StageResources, tmp_path: Path):
    body = ready(tmp_path, {"solution/solve.sh": f"{SOLVE}echo not quite >&2; exit 7"})
    result = await played(resources, body, "oracle")
    assert result.score is not None and result.score.reward == 1.0, "only the verifier decides the reward"
    assert result.trajectory is not None
    user, assistant = result.trajectory.messages
    assert user["content"] == "Write 'Hello, world!' to hello.txt.\n"
    assert assistant["content"] == "solve.sh ended with status 7\nnot quite"


FETCH = "python3 -c 'import sys, urllib.request as u; print(u.urlopen(sys.argv[1]).read())' http://{rule}/"
FETCHING = """\
#!/bin/bash
{fetch} > /tmp/got && cmp -s /tmp/got /app/hello.txt && code=1 || code=0
echo $code > /logs/verifier/reward.txt
"""


@pytest.mark.parametrize("runtime", RUNTIMES)
async def test_a_task_that_needs_a_network_runs_where_the_operator_allows_it(tmp_path: Path, runtime: str):
    async with served() as (server, names, ceiling):
        rule = f"allowed.test:{server.port}"
        toml = TOML.replace("allow_internet = false", f'network_mode = "allowlist"\nallowed_hosts = ["{rule}"]')
        fetch = FETCH.format(rule=rule)
        solve = f"#!/bin/bash\n{fetch} > hello.txt\n"
        files = {"task.toml": toml, "tests/test.sh": FETCHING.format(fetch=fetch), "solution/solve.sh": solve}
        body = local(imported(write(tmp_path / "net", files)), is_sif=runtime == "apptainer")
        async with open_resources(runtime) as resources:
            with pytest.raises(EgressNotAllowed, match="setting egress_hosts"):
                await rewards(resources, body)
            assert await rewards(replace(resources, egress=ceiling, resolve_name=names), body) == (1.0, 0.0)
        assert server.connections == 3, "the oracle and two verifiers"
