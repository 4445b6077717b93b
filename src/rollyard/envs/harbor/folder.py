"""Converts Harbor task folders to tasks' bodies: `rollyard tasks import harbor FOLDER`.

A task that cannot run here as intended (it needs a build, further services or a GPU) is refused with the reason. If it
only might not run, the body's data contains a note. A network that it needs becomes `sandbox.egress`, which the
operator must allow.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from rollyard.core import Json, Task
from rollyard.core.egress import rules_of
from rollyard.core.failure import TaskInvalid
from rollyard.envs.base import check_options
from rollyard.envs.harbor.data import APP, HarborData
from rollyard.envs.harbor.dockerfile import Recipe, last_workdir, read_dockerfile
from rollyard.envs.harbor.files import Packer, text_of
from rollyard.envs.harbor.manifest import ANYWHERE, Manifest, read_manifest
from rollyard.envs.harbor.scripts import fetching_line, needs_root

log = logging.getLogger(__name__)

OPTIONS = ("images", "workdir", "run", "offline", "network", "keep", "safe_path", "refused")
COMPOSE = ("docker-compose.yaml", "docker-compose.yml", "compose.yaml", "compose.yml")

EVAL_GRACE_S = 30.0
"""Added to the verifier's own time limit: EVAL also copies the tests into the sandbox."""

_HOSTS = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")


@dataclass(frozen=True, slots=True)
class Options:
    """The importer's options, parsed."""

    images: str = ""
    workdir: str = ""
    runs_in_prepare: bool = False
    is_offline: bool = False
    network: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()
    is_safe_path: bool = True
    skips_refused: bool = False
    env: Mapping[str, str] | None = None

    @classmethod
    def read(cls, options: Mapping[str, str]) -> Options:
        env = {name.removeprefix("env."): value for name, value in options.items() if name.startswith("env.")}
        check_options("harbor", {name: "" for name in options if not name.startswith("env.")}, OPTIONS)
        return cls(
            images=options.get("images", ""),
            workdir=options.get("workdir", ""),
            runs_in_prepare=_is(options, "run", "prepare", "refuse"),
            is_offline=_is(options, "offline", "yes", "no"),
            network=tuple(host.strip() for host in options.get("network", "").split(",") if host.strip()),
            keep=tuple(path for path in options.get("keep", "").split(":") if path),
            is_safe_path=not _is(options, "safe_path", "no", "yes"),
            skips_refused=_is(options, "refused", "skip", "stop"),
            env=env,
        )


def _is(options: Mapping[str, str], name: str, value: str, default: str) -> bool:
    choice = options.get(name, default)
    if choice not in (value, default):
        raise TaskInvalid(f"harbor: option {name}: {value!r} or {default!r} was expected, not {choice!r}")
    return choice == value


def bodies(folder: Path, raw_options: Mapping[str, str]) -> Iterator[Mapping[str, Json]]:
    """The tasks of a task folder, or of all task folders below a folder. A refused task stops the import unless refused
    tasks are skipped; the error names all refused tasks."""
    options = Options.read(raw_options)
    named = {path.parent for path in folder.rglob("task.toml")}
    task_folders = sorted(path for path in named if named.isdisjoint(path.parents))
    if not task_folders:
        raise TaskInvalid(f"harbor: {folder}: there is no task.toml in it or below it")
    task_bodies: list[Mapping[str, Json]] = []
    refused: list[str] = []
    for task in task_folders:
        try:
            task_bodies.append(body_of(task, options))
        except TaskInvalid as error:
            refused.append(f"{task}: {error.detail}")
    if refused and not (options.skips_refused and task_bodies):
        hint = "; --set refused=skip imports the others" if task_bodies else ""
        raise TaskInvalid("harbor: " + "\n".join(refused) + hint)
    for reason in refused:
        log.warning("task not imported: %s", reason)
    yield from task_bodies


def body_of(folder: Path, options: Options) -> Mapping[str, Json]:
    manifest = read_manifest(folder / "task.toml")
    _refuse(folder, manifest, options)
    packer = Packer(folder.name)
    run_hosts, eval_hosts = _hosts(manifest, options)
    recipe = _recipe(folder, manifest, options, packer, has_network=bool(run_hosts))
    tests = packer.folder(folder / "tests")
    solution = packer.folder(folder / "solution") if (folder / "solution").is_dir() else {}
    script, solve = text_of(tests, "test.sh"), text_of(solution, "solve.sh")
    if not script.strip():
        raise TaskInvalid("tests/test.sh: there is none, or it is empty")
    notes = [*recipe.notes, *(f"task.toml: {key} is not used" for key in manifest.unknown_keys())]
    if (line := fetching_line(script)) and not eval_hosts and not options.is_offline:
        if not manifest.omits_network:
            raise TaskInvalid(
                f"tests/test.sh: {line!r} needs a network, and task.toml allows none: every rollout would fail; add"
                " what it fetches to the image and import with --set offline=yes, or allow hosts: --set network=HOSTS"
            )
        eval_hosts = ANYWHERE
    if manifest.omits_network and not options.network:
        notes.append(f"task.toml does not mention a network; Harbor would allow one, here {_shown(eval_hosts)}")
    if line and eval_hosts and needs_root(line):
        notes.append(
            f"tests/test.sh: {line!r} needs root, which a sandbox does not have: add what it installs to the image"
        )
    if (line := fetching_line(solve)) and not run_hosts:
        notes.append(f"solution/solve.sh: {line!r} needs a network: the oracle may fail")
    if not recipe.workdir:
        notes.append(f"the image's own working folder is not known: the task starts in {APP} (--set workdir=PATH)")
    safe: dict[str, str] = {} if options.is_safe_path else {"PYTHONSAFEPATH": ""}
    data: dict[str, Json] = {
        "name": folder.resolve().name,
        "instruction": _instruction(folder),
        "workdir": recipe.workdir or APP,
        "env": {**recipe.env, **_env(manifest.environment.env, "environment", options)},
        "setup": recipe.setup,
        "tests": tests,
        "verifier_env": {**safe, **_env(manifest.verifier.env, "verifier", options)},
        "solution": solution,
        "solution_env": _env(manifest.solution.env, "solution", options),
        "keep": list(options.keep),
        "metadata": json.loads(json.dumps(manifest.metadata, default=str), parse_constant=str),  # TOML has dates, nan
        "notes": notes,
    }
    limits: dict[str, Json] = {"eval_s": manifest.verifier.timeout_sec + EVAL_GRACE_S}
    if manifest.agent.timeout_sec is not None:
        limits["run_s"] = manifest.agent.timeout_sec
    sandbox: dict[str, Json] = {
        "image": recipe.image,
        "cpus": manifest.environment.cpus,
        "memory_bytes": manifest.memory_bytes,
        "disk_bytes": manifest.disk_bytes,
    }
    if run_hosts or eval_hosts:
        sandbox["egress"] = {"hosts": list(run_hosts), "eval_hosts": list(eval_hosts)}
    non_empty: dict[str, Json] = {name: value for name, value in data.items() if value or name == "tests"}
    HarborData.read(Task("harbor", non_empty))
    return {"environment": "harbor", "data": non_empty, "limits": limits, "sandbox": sandbox}


def _refuse(folder: Path, manifest: Manifest, options: Options) -> None:
    environment, verifier = manifest.environment, manifest.verifier
    if manifest.steps or (folder / "steps").is_dir():
        raise TaskInvalid("task.toml: steps: tasks of several steps are not supported")
    if environment.os.lower() != "linux":
        raise TaskInvalid(f"task.toml: environment.os: only linux is supported, not {environment.os!r}")
    if environment.gpus:
        raise TaskInvalid("task.toml: environment.gpus: sandboxes have no GPU")
    if environment.mcp_servers:
        raise TaskInvalid(
            "task.toml: environment.mcp_servers: a task cannot define servers; name them in the service's setting"
            " mcp_servers and in the task's agent.options.mcp"
        )
    if verifier.environment is not None or verifier.environment_mode not in (None, "shared"):
        raise TaskInvalid("task.toml: verifier.environment: a verifier in a container of its own is not supported")
    for name in COMPOSE:
        if (folder / "environment" / name).exists():
            raise TaskInvalid(f"environment/{name}: services beside the task's own container are not supported")


def _hosts(manifest: Manifest, options: Options) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The hosts for RUN and for EVAL: those that the task requests, or `--set network=…` instead."""
    if options.is_offline:
        return (), ()
    run, judging = manifest.hosts()
    if options.network and manifest.omits_network:
        run = judging = options.network
    elif options.network:
        run, judging = (options.network if hosts else () for hosts in (run, judging))
    rules_of((*run, *judging), "harbor: --set network" if options.network else "task.toml: allowed_hosts")
    return run, judging


def _shown(eval_hosts: tuple[str, ...]) -> str:
    return "its tests need one (sandbox.egress)" if eval_hosts else "the sandbox is offline"


def _recipe(folder: Path, manifest: Manifest, options: Options, packer: Packer, *, has_network: bool) -> Recipe:
    """For an existing image, only its name and working folder; else the recipe of the Dockerfile."""
    path, place = folder / "environment" / "Dockerfile", "environment/Dockerfile"
    image = options.images.replace("{name}", folder.resolve().name)
    if not image and manifest.environment.docker_image:
        image = f"docker://{manifest.environment.docker_image.removeprefix('docker://')}"
    if image:
        recipe = Recipe(image, last_workdir(path, place) if path.is_file() else "")
    elif path.is_file():
        recipe = _without_build(folder, read_dockerfile(path, place, packer), options, has_network=has_network)
    else:
        raise TaskInvalid("there is no image: neither environment.docker_image in task.toml nor environment/Dockerfile")
    recipe.workdir = options.workdir or manifest.environment.workdir or recipe.workdir
    return recipe


def _without_build(folder: Path, recipe: Recipe, options: Options, *, has_network: bool) -> Recipe:
    recipe.image = f"docker://{recipe.image.removeprefix('docker://')}"
    for run in recipe.runs:
        if not options.runs_in_prepare:
            build = f"rollyard images build {folder / 'environment'} --name {folder.resolve().name.lower()}"
            raise TaskInvalid(
                f"{run}: this needs a build: {build}, then import with --set images={{name}}; or --set run=prepare runs"
                " it when the task is set up, with the task's own network"
            )
        line = fetching_line(run.partition(": RUN ")[2])
        if line and not options.is_offline and (not has_network or needs_root(line)):
            what = "root, which sandboxes do not have" if has_network else "a network, and the task has none"
            raise TaskInvalid(f"{run}: needs {what}; build the image instead")
    return recipe


def _instruction(folder: Path) -> str:
    try:
        text = (folder / "instruction.md").read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise TaskInvalid(f"instruction.md cannot be read: {error}") from error
    if not text.strip():
        raise TaskInvalid("instruction.md is empty")
    return text


def _env(env: Mapping[str, str], table: str, options: Options) -> dict[str, str]:
    """Replaces ${NAME} in values. In Harbor it is a variable of the host; here only variables from --set are used."""

    def value(match: re.Match[str]) -> str:
        replacement = (options.env or {}).get(match[1], match[2])
        if replacement is None:
            raise TaskInvalid(
                f"task.toml: {table}.env: ${{{match[1]}}} is a variable of the host; set its value with"
                f" --set env.{match[1]}=VALUE"
            )
        return replacement

    return {name: _HOSTS.sub(value, text) for name, text in env.items()}
