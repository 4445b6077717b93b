"""A batch script for Slurm: the service on an allocation's first node, with Ray on all of them if there are several.

`script` generates it from a `JobSpec`: a header of #SBATCH lines and variables, and `slurm_job.sh`, which is the same
in every job. It is meant to be read and contains no secret: tokens and the store's URL are files of mode 0600 in the
job's folder, which all nodes share.

After a preemption or the failure of its first node, Slurm requeues the job (--requeue) under the same number, and the
service continues with the same data. When time is nearly up, and at `rollyard slurm down`, the script alone gets
SIGUSR1 and drains the service; unless it was `down`, the job requeues itself. Another node that fails loses only its
own rollouts.

One node needs no fleet: the service runs the rollouts itself, without Ray.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

JOB_SH = Path(__file__).with_name("slurm_job.sh")
DRAIN_MARGIN_S = 60
"""Seconds from the end of a drain to the end of the job: Slurm's signal may be a minute late, and Ray must end."""

SCRATCH = "/tmp/rollyard"
MAX_SCRATCH_CHARS = 24
"""Ray's sockets are below it, with 62 characters of their own and the job's number; a socket's path has at most 107."""

_PLAIN_PATH = re.compile(r"/[\w./+@=:,-]*")  # what an #SBATCH line takes unquoted: no blanks, quotes or %


class SlurmError(Exception):
    """What is wrong, and the remedy."""

    def __init__(self, what: str, remedy: str = "", *, is_usage: bool = False) -> None:
        super().__init__(what)
        self.what = what
        self.remedy = remedy
        self.is_usage = is_usage


@dataclass(frozen=True, slots=True)
class JobSpec:
    """The options of `rollyard slurm up`. `folder` is the job's own; like `python`, it is on a file system that all
    nodes share."""

    folder: Path
    python: Path
    service_dir: Path
    nodes: int = 1
    partition: str = ""
    account: str = ""
    qos: str = ""
    time: str = ""
    gres: str = ""
    cpus: int | None = None
    mem: str = ""
    extra: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    engines: tuple[str, ...] = ()
    engine_command: str = ""
    engine_nodes: int | None = None
    serve_options: tuple[str, ...] = ()
    settings: Mapping[str, object] = field(default_factory=dict)
    scratch: str = SCRATCH
    port: int | None = None
    drain_s: float = 60.0
    uses_ray: bool = False
    is_requeued: bool = True

    def __post_init__(self) -> None:
        for what, path in (("folder", self.folder), ("service's folder", self.service_dir), ("Python", self.python)):
            if not _PLAIN_PATH.fullmatch(str(path)):
                raise SlurmError(
                    f"the {what} {path} cannot be used in a batch script",
                    "choose one without blanks or special characters",
                )
        if not _PLAIN_PATH.fullmatch(self.scratch) or len(self.scratch) > MAX_SCRATCH_CHARS:
            why = f"scratch {self.scratch} is not an absolute path of at most {MAX_SCRATCH_CHARS} plain characters"
            raise SlurmError(why, "Ray's sockets are below it, and their paths have a limited length", is_usage=True)
        if self.engine_command and "{port}" not in self.engine_command:
            raise SlurmError(
                "the engine's command does not contain {port}",
                "write it as 'vllm serve MODEL --host {host} --port {port}'",
                is_usage=True,
            )
        if self.nodes > 1 and not self.uses_ray:
            raise SlurmError("several nodes need Ray", "leave out --no-ray, or take one node", is_usage=True)
        for line in self.extra:
            if not line.startswith("#SBATCH ") or "\n" in line:
                raise SlurmError(f"{line!r} is not an #SBATCH line", "--extra '#SBATCH --constraint=…'", is_usage=True)


def script(spec: JobSpec) -> str:
    """Returns the whole script, which ends with a newline."""
    return "\n".join((*_header(spec), "", *_variables(spec), "", JOB_SH.read_text()))


def _header(spec: JobSpec) -> Iterator[str]:
    yield "#!/bin/bash"
    yield "# Written by `rollyard slurm up`: first the part of this job, then the part that is the same in every job."
    yield "#SBATCH --job-name=rollyard"
    yield f"#SBATCH --nodes={spec.nodes}"
    yield "#SBATCH --ntasks-per-node=1"
    for name in ("partition", "account", "qos", "time", "gres", "mem"):
        if value := getattr(spec, name):
            yield f"#SBATCH --{name}={value}"
    if spec.cpus is not None:
        yield f"#SBATCH --cpus-per-task={spec.cpus}"
    else:
        yield "# Whole nodes; --cpus takes a part of each."
        yield "#SBATCH --exclusive"
        if not spec.mem:
            yield "#SBATCH --mem=0"
    yield f"#SBATCH --output={spec.folder}/job.log"
    yield "#SBATCH --open-mode=append"
    yield "# Preempted, or its first node failed: the job is requeued. Another node failed: it continues without it."
    yield "#SBATCH --requeue" if spec.is_requeued else "#SBATCH --no-requeue"
    yield "#SBATCH --no-kill"
    yield f"# Seconds before its time is up at which this script alone gets SIGUSR1: {spec.drain_s:g} for the service's"
    yield f"# drain, {DRAIN_MARGIN_S} for the rest."
    yield f"#SBATCH --signal=B:USR1@{int(spec.drain_s) + DRAIN_MARGIN_S}"
    yield from spec.extra


def _variables(spec: JobSpec) -> Iterator[str]:
    command = (str(spec.python), "-m", "rollyard", "serve", *spec.serve_options)
    engine_nodes = spec.nodes if spec.engine_nodes is None else min(spec.engine_nodes, spec.nodes)
    yield f"FOLDER={spec.folder}  # tokens, logs and the service's address; shared by all nodes"
    yield f"PYTHON={spec.python}"
    yield f"SERVICE={spec.service_dir}  # the service's data"
    yield f"SCRATCH={spec.scratch}  # on each node, followed by the job's number; deleted with the job"
    yield f"PORT={spec.port or ''}  # of the service; empty: derived from the job's number"
    yield f"USES_RAY={int(spec.uses_ray)} REQUEUES={int(spec.is_requeued)}"
    yield f"ENGINES=({shlex.join(spec.engines)})"
    yield f"ENGINE_NODES={engine_nodes if spec.engine_command else 0}  # number of this job's nodes with an engine"
    yield f"SERVICE_COMMAND=({shlex.join(command)})"
    yield "# Settings of the service and its nodes, as `rollyard config` names them."
    for name, value in {**spec.settings, "drain_s": f"{spec.drain_s:g}"}.items():
        yield f"export ROLLYARD_{name.upper()}={shlex.quote(str(value))}"
    yield "setup() { # on every node, before anything else"
    yield from (f"  {line}" for line in spec.setup or (":",))
    yield "}"
    yield "engine() {"
    yield f"  {_engine(spec.engine_command) or ':'}"
    yield "}"


def _engine(command: str) -> str:
    """Replaces {host} and {port} by the engine's own; everything else is left to the shell unchanged."""
    return command.replace("{host}", '"$ENGINE_HOST"').replace("{port}", '"$ENGINE_PORT"')
