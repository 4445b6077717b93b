"""EVAL `same`: RUN's whole file system is evaluated, and the evaluation *executes* nothing that RUN left.

Each hostile case plants something, shows in RUN that it works (`touch bit`), and then meets a check that it would have
fooled.
"""

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollyard.core import Limits, Outcome, Rollout, SandboxOptions, Score, State, Task
from rollyard.core.failure import InvalidRequest, VerifierCrashed
from rollyard.envs import EnvContext, Environment, Environments, Evidence, Plan, Start
from rollyard.envs.protected import PROTECTED, home_paths, search_paths
from rollyard.sandbox import ApptainerRuntime, Bind, BubblewrapRuntime
from rollyard.sandbox.images import ImageStore
from tests.pipeline.site import SETTINGS, Site, finish, open_site, says, shell, shell_task
from tests.sandbox.registry import busybox, file, pack, tar, write_layout
from tests.sandbox.runtimes import image

pytestmark = pytest.mark.slow

BIT = "test -f /workspace/bit"


def same_task(*checks: str, **data: Any) -> Task:
    """On a real image, in which the agent may change everything."""
    task = shell_task(checks=list(checks), **{"eval": "same", **data})
    limits = replace(task.limits, init_s=60, run_s=60, eval_s=60, tool_s=30)
    return replace(task, limits=limits, sandbox=SandboxOptions(image=image(is_sif=False)))


def frozen(site: Site) -> list[str]:
    return [path.name for path in site.runtime.layer_root.glob(".run-*")]


async def wait_for_removal(site: Site) -> None:
    """Waits until RUN's files are deleted."""
    (layers,) = site.pipeline.resources.layers.values()
    while layers._removals:
        await asyncio.wait(layers._removals)
    assert not [path.name for path in site.runtime.layer_root.iterdir() if path.name.startswith(".")]


def scored(rollout: Rollout) -> Score:
    assert rollout.ending is not None
    assert rollout.ending.outcome is Outcome.COMPLETED, rollout.ending.failure
    assert rollout.ending.score is not None
    return rollout.ending.score


async def test_fresh_what_the_agent_deleted_of_the_image_does_not_come_back(tmp_path: Path):
    folder = tmp_path / "image"
    shutil.copytree(image(is_sif=False), folder, symlinks=True)
    (folder / "workspace" / "old").mkdir(parents=True, exist_ok=True)
    (folder / "workspace" / "old" / "file").write_text("of the image")
    (folder / "workspace" / "kept").write_text("of the image")
    task = same_task("test ! -e old && test -f kept && test -f new", eval="fresh")
    task = replace(task, sandbox=SandboxOptions(image=str(folder)))
    async with open_site(tmp_path / "site", says(shell("rm -r old && touch new"), finish())) as site:
        assert scored(await site.rolled(task)).reward == 1.0


async def test_without_an_image_the_checks_see_workspace_home_and_tmp(tmp_path: Path):
    run = "echo x > /tmp/t && echo y > ~/note && echo 'exit 0' > ~/.profile && rm b && mkdir c && bash -lc 'exit 1'"
    checks = ("grep -qx x /tmp/t && grep -qx y ~/note", "test ! -e b && test -d c && test -f a", "! bash -lc 'exit 1'")
    task = replace(same_task(*checks, files={"a": "given", "b": "to be deleted"}), sandbox=SandboxOptions())
    async with open_site(tmp_path, says(shell(run), finish())) as site:
        assert scored(await site.rolled(task)).components == {"check_0": 1.0, "check_1": 1.0, "check_2": 1.0}
        await wait_for_removal(site)


@pytest.mark.parametrize("is_sif", [False, True], ids=["folder", "sif"])
@pytest.mark.parametrize("kind", [BubblewrapRuntime, ApptainerRuntime], ids=lambda kind: kind.name)
async def test_the_checks_see_all_files_of_run_and_of_the_set_up(tmp_path: Path, kind: Any, is_sif: bool):
    run = "mkdir -p /srv/data && echo 42 > /srv/data/answer && echo x > /tmp/t && echo y > ~/note && rm /workspace/b"
    task = same_task(
        "grep -qx 42 /srv/data/answer",
        "grep -qx x /tmp/t && grep -qx y ~/note",
        "grep -qx given /workspace/a && test ! -e /workspace/b",
        files={"a": "given\n", "b": "to be deleted"},
    )
    task = replace(task, sandbox=SandboxOptions(image=image(is_sif=is_sif)))
    async with open_site(tmp_path, says(shell(run), finish()), kind=kind) as site:
        rollout = await site.rolled(task)
        assert scored(rollout).components == {"check_0": 1.0, "check_1": 1.0, "check_2": 1.0}
        await wait_for_removal(site)


PLANT = "printf '#!/bin/sh\\nexit 0\\n' > {0} && chmod +x {0}"
CASES: dict[str, tuple[str, tuple[str, ...]]] = {
    "a python before the real one in PATH": (
        f"mkdir -p /usr/local/bin && {PLANT.format('/usr/local/bin/python3')} && hash -r"
        " && python3 -c 'raise SystemExit(1)' && touch bit",
        ("! python3 -c 'raise SystemExit(1)'",),
    ),
    "git itself replaced, and a pytest that always passes": (
        f"{PLANT.format('/usr/bin/git')} && {PLANT.format('/usr/bin/pytest')} && git no-such-command && pytest"
        " && touch bit",
        ("! git no-such-command", "! command -v pytest"),
    ),
    "an interpreter deleted": ("rm -r /usr/lib/python3* && ! python3 -c pass && touch bit", ("python3 -c pass",)),
    "sitecustomize of the system and of the user": (
        "user=$(python3 -m site --user-site) && mkdir -p $user /usr/lib/python3/dist-packages"
        " && echo 'import os; os._exit(0)' | tee $user/usercustomize.py"
        " /usr/lib/python3/dist-packages/sitecustomize.py > /dev/null"
        " && python3 -c 'raise SystemExit(1)' && touch bit",
        ("! python3 -c 'raise SystemExit(1)'",),
    ),
    "a module of the workspace in place of the library's": (
        "echo 'raise SystemExit(0)' > json.py && python3 -c 'import json; raise SystemExit(1)' && touch bit",
        ("! python3 -c 'import json; raise SystemExit(1)'",),
    ),
    "git's hooks, fsmonitor and the user's configuration": (
        "git init -q . && printf '#!/bin/sh\\ntouch /workspace/hooked\\n' > .git/hooks/pre-commit"
        " && chmod +x .git/hooks/pre-commit && git config core.fsmonitor /workspace/.git/hooks/pre-commit"
        " && git config --global alias.st '!touch /workspace/hooked' && git status > /dev/null; test -e hooked"
        " && rm hooked && touch bit",
        (
            "git status && git -c user.name=a -c user.email=b commit -q --allow-empty -m x && test ! -e hooked",
            "! git st && test ! -e hooked",
        ),
    ),
    "a signature for git to verify by a planted program": (
        "git init -q . && printf '#!/bin/sh\\ntouch /workspace/hooked\\n' > evil && chmod +x evil"
        " && git -c user.name=a -c user.email=b commit -q --allow-empty -m x"
        " && git cat-file commit HEAD | sed '/^committer/a gpgsig -----BEGIN PGP SIGNATURE-----\\n \\n -----END PGP"
        " SIGNATURE-----' > c && git update-ref HEAD $(git hash-object -t commit -w c)"
        " && git config log.showSignature true && git config gpg.program /workspace/evil"
        " && git log > /dev/null; test -e hooked && rm hooked && touch bit",
        ("git log > /dev/null && test ! -e hooked",),
    ),
    "the shell's start-up files": (
        "echo 'exit 0' | tee ~/.profile ~/.bashrc ~/.bash_profile /etc/profile /etc/bash.bashrc > /dev/null"
        " && bash -lc 'exit 1' && touch bit",
        ("! bash -lc 'exit 1'", "! bash -ic 'exit 1'"),
    ),
    "a home that is a link to a planted one": (
        "mkdir evil && echo 'exit 0' > evil/.profile && cd / && mv /home/agent /home/old"
        " && ln -s /workspace/evil /home/agent && bash -lc 'exit 1' && touch /workspace/bit",
        ("! bash -lc 'exit 1'",),
    ),
    "a whole package in place of the real one": (
        "cd /usr/lib/python3.11 && mv json /tmp && mkdir json && echo 'raise SystemExit(0)' > json/__init__.py"
        " && python3 -c 'import json; raise SystemExit(1)' && touch /workspace/bit",
        ("! python3 -c 'import json; raise SystemExit(1)'", "python3 -c 'import json.decoder'"),
    ),
    "a library for every program": (
        "echo /workspace/evil.so > /etc/ld.so.preload; ls 2>&1 | grep -q preloaded && touch bit",
        ("! ls 2>&1 | grep -q preloaded",),
    ),
    "variables of the session": (
        "export LD_PRELOAD=/workspace/evil.so PYTHONPATH=/workspace BASH_ENV=/workspace/evil PATH=/workspace:$PATH;"
        " touch bit",
        ('test -z "$LD_PRELOAD$PYTHONPATH$BASH_ENV" && case "$PATH" in *workspace*) false;; esac',),
    ),
    "scripts that set an image's variables": (
        "mkdir -p /.singularity.d/env && for name in 90-environment 91-environment 99-evil; do echo"
        " 'export BASH_ENV=/workspace/evil EVIL=1' > /.singularity.d/env/$name.sh; done; touch bit",
        ('test -z "$BASH_ENV$EVIL"',),
    ),
    "a daemon in a session of its own": (
        "setsid -f sh -c 'while :; do date > /workspace/alive; sleep 0.02; done' && until test -e alive; do :; done"
        " && touch bit",
        ("rm -f alive && sleep 0.3 && test ! -e alive", "! grep -l 'a[l]ive' /proc/[0-9]*/cmdline"),
    ),
}


@pytest.mark.parametrize("kind", [BubblewrapRuntime, ApptainerRuntime], ids=lambda kind: kind.name)
@pytest.mark.parametrize("case", CASES)
async def test_files_planted_by_run_do_not_fool_the_checks(tmp_path: Path, case: str, kind: Any):
    attack, checks = CASES[case]
    async with open_site(tmp_path, says(shell(attack), finish()), kind=kind) as site:
        score = scored(await site.rolled(same_task(BIT, *checks), within_s=50))
        assert score.components["check_0"] == 1.0, "the attack did not even work in RUN"
        assert score.reward == 1.0, score.components
        await wait_for_removal(site)


class Verified(Environment):
    """A verifier with its own tests, bound from outside, that leaves its verdict in a file, as many do."""

    name = "verified"
    tools = ("shell", "finish")

    def __init__(self, tests: Path, inside: str = "/tests") -> None:
        self._bind = Bind(tests, inside)
        self.tries = 0
        self.crashes = 0

    def plan(self, task: Task) -> Plan:
        return Plan(eval_mode="same", protected=(*PROTECTED, "/logs"), eval_binds=(self._bind,))

    async def init(self, context: EnvContext) -> Start:
        return Start(({"role": "user", "content": "do it"},))

    async def eval(self, context: EnvContext, evidence: Evidence) -> Score:
        assert context.sandbox is not None
        self.tries += 1
        await context.run(f"mkdir -p /logs; sh {self._bind.inside}/run.sh", timeout_s=30)
        if self.tries <= self.crashes:
            await context.run("touch /workspace/by-the-verifier", timeout_s=10)
            raise VerifierCrashed("not this time")
        try:
            return Score(float(await context.sandbox.read("/logs/reward", limit_bytes=100)))
        except FileNotFoundError:
            return Score(0.0)


@pytest.fixture
def tests_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "verifier"
    folder.mkdir()
    passes = "test ! -e /workspace/by-the-verifier && grep -qx right /srv/answer && echo 1 > /logs/reward"
    (folder / "run.sh").write_text(f"{passes}\ntouch /tests/x 2>/dev/null && echo 0 > /logs/reward\n")
    return folder


def verified_task() -> Task:
    limits = Limits(init_s=60, run_s=60, eval_s=60, tool_s=30, model_s=10, max_turns=8)
    return Task("verified", limits=limits, sandbox=SandboxOptions(image=image(is_sif=False)))


def verified_site(tmp_path: Path, environment: Environment, *turns: str, **options: Any) -> Any:
    environments = Environments({"verified": environment})
    return open_site(tmp_path / "site", says(*turns, finish()), environments=environments, **options)


RIGHT = "mkdir -p /srv && echo right > /srv/answer"
FORGED = "mkdir -p /logs && echo 1 > /logs/reward"


@pytest.mark.parametrize(
    ("attack", "reward"),
    [
        (RIGHT, 1.0),
        (FORGED, 0.0),
        (f"{FORGED}; mkdir evil; echo 'echo 1 > /logs/reward' > evil/run.sh; ln -s /workspace/evil /tests", 0.0),
        (f"{RIGHT}; ln -s /workspace /tests", 1.0),
        (f"{RIGHT}; ln -s /srv /logs", 1.0),
        ("mkdir -p /tests; echo 'echo 1 > /logs/reward' > /tests/run.sh; chmod 0 /tests", 0.0),
    ],
    ids=["honest", "reward written before", "tests linked", "tests linked, right", "logs linked", "tests planted"],
)
async def test_the_agent_cannot_change_the_verifiers_tests_and_verdict(
    tmp_path: Path, tests_folder: Path, attack: str, reward: float
):
    async with verified_site(tmp_path, Verified(tests_folder), shell(attack)) as site:
        assert scored(await site.rolled(verified_task(), within_s=50)).reward == reward
        assert sorted(path.name for path in tests_folder.iterdir()) == ["run.sh"]
        await wait_for_removal(site)


@pytest.mark.parametrize("kind", [BubblewrapRuntime, ApptainerRuntime], ids=lambda kind: kind.name)
async def test_a_link_of_the_agent_to_a_folder_of_the_host_deletes_nothing_there(
    tmp_path: Path, tests_folder: Path, kind: Any
):
    """A path of RUN's files that EVAL must not see is deleted, whatever it leads to on the host."""
    host = tmp_path / "host"
    (host / "folder").mkdir(parents=True)
    kept = [host / "one", host / "folder" / "two"]
    for path in kept:
        path.write_text("kept")
    attack = f"{RIGHT}; ln -s {host} /logs; ln -s {host} ~/.config; ln -s {host} ~/.local"
    async with verified_site(tmp_path, Verified(tests_folder), shell(attack), kind=kind) as site:
        assert scored(await site.rolled(verified_task(), within_s=50)).reward == 1.0
        await wait_for_removal(site)
    assert [path.read_text() for path in kept] == ["kept", "kept"]


async def test_tests_may_be_bound_into_the_workspace_over_the_agents_files(tmp_path: Path, tests_folder: Path):
    attack = f"{RIGHT}; mkdir evil; echo 'echo 0 > /logs/reward' > evil/run.sh; ln -s evil /workspace/tests"
    async with verified_site(tmp_path, Verified(tests_folder, "/workspace/tests"), shell(attack)) as site:
        assert scored(await site.rolled(verified_task(), within_s=50)).reward == 1.0


async def test_a_second_try_starts_from_the_same_files(tmp_path: Path, tests_folder: Path):
    environment = Verified(tests_folder)
    environment.crashes = 1
    async with verified_site(tmp_path, environment, shell(RIGHT)) as site:
        rollout = await site.rolled(verified_task(), within_s=50)
        assert scored(rollout).reward == 1.0, "what the first try wrote was still there"
        assert environment.tries == 2
        await wait_for_removal(site)


async def test_an_evaluation_that_keeps_crashing_leaves_nothing(tmp_path: Path, tests_folder: Path):
    environment = Verified(tests_folder)
    environment.crashes = 99
    async with verified_site(tmp_path, environment, shell(RIGHT), settings=replace(SETTINGS, eval_attempts=2)) as site:
        rollout = await site.rolled(verified_task(), within_s=50)
        assert rollout.ending is not None
        assert rollout.ending.failure is not None
        assert rollout.ending.failure.code == "verifier_crashed"
        await wait_for_removal(site)
        site.nothing_left()


async def test_a_cancel_in_eval_deletes_runs_files(tmp_path: Path):
    async with open_site(
        tmp_path, says(shell("touch /made"), finish()), settings=replace(SETTINGS, eval_slots=0)
    ) as site:
        rollout_id = await site.submit(same_task("test -e /made"))
        await site.until(rollout_id, State.EVAL)
        await site.idle_run()
        assert len(frozen(site)) == 1
        await site.pipeline.cancel(rollout_id)
        assert (await site.ended(rollout_id)).ending is not None
        await wait_for_removal(site)
        site.nothing_left()


async def test_after_a_restart_run_is_repeated_because_its_files_are_gone(tmp_path: Path):
    script = says(shell("touch /made"), finish())
    settings = replace(SETTINGS, max_attempts=1)
    async with open_site(tmp_path, script, settings=replace(settings, eval_slots=0)) as site:
        rollout_id = await site.submit(same_task("test -e /made"))
        await site.until(rollout_id, State.EVAL)
        await site.idle_run()
    async with open_site(tmp_path, script, settings=settings) as site:
        rollout = await site.ended(rollout_id)
        assert scored(rollout).reward == 1.0
        assert (rollout.attempt, rollout.excused) == (2, 1), "an orderly stop costs no attempt"
        await wait_for_removal(site)


async def test_files_left_by_a_crash_are_deleted(tmp_path: Path):
    leftover = tmp_path / "sandboxes" / "layers" / ".run-l_0" / "files"
    leftover.mkdir(parents=True)
    async with open_site(tmp_path, says(finish())) as site:
        await wait_for_removal(site)
        assert not leftover.exists()


async def test_a_rollout_with_eval_same_cannot_be_rescored(tmp_path: Path):
    async with open_site(tmp_path, says(shell("touch /made"), finish())) as site:
        rollout = await site.rolled(same_task("test -e /made"))
        assert scored(rollout).reward == 1.0
        with pytest.raises(InvalidRequest, match="same"):
            await site.pipeline.rescore(rollout.id)


async def test_an_agent_that_ends_its_sandbox_gets_the_failing_score(tmp_path: Path):
    # The second command: the shell itself outlives `kill -9 -1` for a moment, and could finish first.
    async with open_site(tmp_path, says(shell("kill -9 -1"), shell("sleep 30"), finish())) as site:
        rollout = await site.rolled(same_task("true"))
        assert rollout.ending is not None
        assert rollout.ending.failure is not None
        assert rollout.ending.failure.code == "sandbox_ended_by_policy"
        assert rollout.ending.score == Score(0.0)
        await wait_for_removal(site)


def test_paths_in_the_plans_variables_are_protected():
    env = {"PATH": "/opt/x/bin:/workspace/.venv/bin:/usr/bin/..:relative:", "PYTHONPATH": "/srv/lib", "LANG": "C"}
    paths = list(search_paths(env))
    assert {"/opt/x/bin", "/opt/x/lib", "/workspace/.venv/bin", "/workspace/.venv/pyvenv.cfg", "/srv/lib"} <= {*paths}
    assert not {"/", "/lib", "relative"} & {*paths}


def test_the_workspace_itself_is_never_protected():
    env = {
        "PATH": "/workspace/bin:/workspace",
        "PYTHONPATH": "/workspace:/workspace/://workspace",
        "HOME": "/workspace",
    }
    paths = [*search_paths(env), *home_paths(env)]
    assert not {"/workspace", "//workspace", "/workspace/lib", "/workspace/bin/lib"} & {*paths}
    assert "/workspace/.profile" in paths


class Ready(Environment):
    """A set-up with a virtual environment, and a home that is not the runtime's."""

    name = "ready"
    tools = ("shell", "finish")

    def plan(self, task: Task) -> Plan:
        return Plan(eval_mode="same", env={"PATH": "/venv/bin:/usr/bin:/bin", "HOME": "/srv/home"})

    async def prepare(self, context: EnvContext) -> None:
        result = await context.run("/usr/bin/python3 -m venv --without-pip /venv && mkdir -p /srv/home", timeout_s=60)
        assert result.status == 0, result.stderr

    async def init(self, context: EnvContext) -> Start:
        return Start(({"role": "user", "content": "do it"},))

    async def eval(self, context: EnvContext, evidence: Evidence) -> Score:
        bit = await context.run(BIT, timeout_s=10)
        fooled = await context.run("python3 -c 'raise SystemExit(1)' || bash -lc 'exit 1'", timeout_s=10)
        return Score(1.0 - (fooled.status == 0), components={"bit": float(bit.status == 0)})


@pytest.mark.parametrize(
    "attack",
    [
        "for there in /venv/lib/python3.*/site-packages; do"
        " echo 'import os; os._exit(0)' > $there/sitecustomize.py; done",
        "echo 'exit 0' > ~/.profile",
    ],
    ids=["a package in it", "a start-up file"],
)
async def test_a_virtual_environment_in_path_and_the_home_are_restored_from_the_image(tmp_path: Path, attack: str):
    task = replace(verified_task(), environment="ready")
    fooled = "(python3 -c 'raise SystemExit(1)' || bash -lc 'exit 1') && touch /workspace/bit"
    environments = Environments({"ready": Ready()})
    turns = says(shell(f"{attack}; {fooled}"), finish())
    async with open_site(tmp_path / "site", turns, environments=environments) as site:
        score = scored(await site.rolled(task, within_s=60))
        assert score.components["bit"] == 1.0, "the attack did not even work in RUN"
        assert score.reward == 1.0


class Retagged(Verified):
    """While it is rolled out, its image's name is moved to another image."""

    def __init__(self, retag: Callable[[], Awaitable[object]]) -> None:
        self._retag = retag

    def plan(self, task: Task) -> Plan:
        return Plan(eval_mode="same")

    async def init(self, context: EnvContext) -> Start:
        await self._retag()
        return await super().init(context)

    async def eval(self, context: EnvContext, evidence: Evidence) -> Score:
        result = await context.run("cat /etc/version /workspace/made; echo $WHICH", timeout_s=10)
        return Score(float(result.stdout == b"first\nby run\nfirst\n"))


async def test_eval_uses_runs_image_even_if_its_name_was_retagged(tmp_path: Path):
    for which in ("first", "second"):
        packed = pack(tar(*busybox(), file("etc/version", f"{which}\n")), env=[f"WHICH={which}", "PATH=/bin"])
        write_layout(tmp_path / which, packed)
    store = ImageStore(tmp_path / "images")
    await store.pull(f"oci:{tmp_path}/first", name="mine")
    environment = Retagged(lambda: store.pull(f"oci:{tmp_path}/second", name="mine"))
    task = replace(verified_task(), sandbox=SandboxOptions(image="mine"))
    async with verified_site(tmp_path, environment, shell("echo by run > /workspace/made")) as site:
        site.pipeline.resources = replace(site.pipeline.resources, images=store)
        assert scored(await site.rolled(task)).reward == 1.0
    assert store.remove("mine").references == ("mine:latest",), "the image is not held any more"
