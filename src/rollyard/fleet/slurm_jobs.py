"""Calls Slurm's own commands, and manages the folder that identifies a job.

The folder contains `cluster.json` (the job's number), `job.sh`, `job.log`, `token` and, while the service answers,
`url`. Slurm's commands are the one interface that every site has; their output is requested in fixed formats.
"""

from __future__ import annotations

import json
import secrets
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from rollyard.core.files import replacing
from rollyard.fleet.slurm import JobSpec, SlurmError, script

COMMAND_S = 60.0
"""Timeout of one of Slurm's commands: a busy controller is slow."""

ENDED = frozenset(
    {
        *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"),
        *("REVOKED", "TIMEOUT", "GONE"),
    }
)
WAITING = frozenset(
    {
        *("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD", "SPECIAL_EXIT"),
        "SUSPENDED",
    }
)
HOPELESS = frozenset(
    {
        *("BadConstraints", "PartitionDown", "PartitionInactive", "PartitionNodeLimit", "PartitionTimeLimit"),
        *("InvalidAccount", "InvalidQOS", "AccountNotAllowed", "QOSNotAllowed", "QOSMaxWallDurationPerJobLimit"),
        *("AssocMaxWallDurationPerJobLimit", "JobHeldAdmin", "JobHeldUser", "JobLaunchFailure"),
    }
)
"""Reasons of a waiting job that time alone does not resolve."""

LOG_LINES = 5
"""Lines of a failed job's log that an error message contains."""


@dataclass(frozen=True, slots=True)
class SlurmJob:
    """A job as Slurm reports it. `state` is GONE when Slurm has no record of it any more."""

    id: str
    state: str
    reason: str = ""
    nodes: tuple[str, ...] = ()
    ran_for: str = ""
    begins_at: str = ""

    @property
    def is_over(self) -> bool:
        return self.state in ENDED

    @property
    def is_waiting(self) -> bool:
        return self.state in WAITING

    @property
    def is_hopeless(self) -> bool:
        return self.is_waiting and self.reason.strip("()") in HOPELESS


@dataclass(frozen=True, slots=True)
class SlurmCluster:
    """A job's folder. Only Rollyard writes to it; deleting it deletes the service's data, too."""

    folder: Path

    @property
    def token_file(self) -> Path:
        return self.folder / "token"

    @property
    def url(self) -> str:
        """The service's URL; empty if it does not answer."""
        try:
            return (self.folder / "url").read_text().strip()
        except OSError:
            return ""

    @property
    def job_id(self) -> str:
        """The job's number; empty if nothing was submitted from here."""
        try:
            return str(json.loads((self.folder / "cluster.json").read_text())["job_id"])
        except FileNotFoundError:
            return ""
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise SlurmError(f"{self.folder / 'cluster.json'} cannot be read: {error}", "delete it") from error

    def log_end(self) -> str:
        try:
            lines = (self.folder / "job.log").read_text(errors="replace").splitlines()
        except OSError:
            return ""
        return "\n".join(lines[-LOG_LINES:])

    def submit(self, spec: JobSpec, store_url: str = "") -> str:
        """Writes the files and calls sbatch. Returns the job's number."""
        require_slurm()
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for name in ("url", "down"):
            (self.folder / name).unlink(missing_ok=True)
        for name in ("token", "ray-token"):
            if not (self.folder / name).exists():
                _write(self.folder / name, secrets.token_urlsafe(32) + "\n")
        if store_url:
            _write(self.folder / "store-url", store_url + "\n")
        else:
            (self.folder / "store-url").unlink(missing_ok=True)
        _write(self.folder / "job.sh", script(spec))
        # --parsable: "NUMBER" or "NUMBER;CLUSTER"
        output = _slurm("sbatch", "--parsable", str(self.folder / "job.sh")).strip()
        job_id = output.splitlines()[-1].partition(";")[0] if output else ""
        if not job_id.isdigit():
            raise SlurmError(f"sbatch answered {output!r}, which is not a job's number", "see squeue --me")
        _write(self.folder / "cluster.json", json.dumps({"job_id": job_id, "nodes": spec.nodes}) + "\n")
        return job_id

    def drain(self, job: SlurmJob) -> None:
        """Signals the job's script to drain and not to requeue; a job that is not running is cancelled."""
        _write(self.folder / "down", "")
        if job.state in ("RUNNING", "STOPPED"):
            _slurm("scancel", "--signal=USR1", "--batch", job.id)
        elif not job.is_over and job.state != "COMPLETING":
            cancel(job.id)


def require_slurm() -> None:
    if shutil.which("sbatch") is None:
        raise SlurmError("this machine has no Slurm: sbatch is not in PATH", "run this on a login node of the cluster")


def read_job(job_id: str) -> SlurmJob:
    """Returns the job's state. Slurm drops an ended job after minutes; its accounting, if there is one, keeps it."""
    require_slurm()
    form = "--format=%T|%r|%N|%M|%S"
    output = _slurm("squeue", "--noheader", "--states=all", f"--jobs={job_id}", form, may_miss="Invalid job id").strip()
    if not output:
        return SlurmJob(job_id, _state_from_accounting(job_id))
    state, reason, names, ran_for, begins_at = output.splitlines()[-1].split("|")
    nodes = _slurm("scontrol", "show", "hostnames", names).split() if names else ()
    return SlurmJob(job_id, state, "" if reason == "None" else reason, tuple(nodes), ran_for, begins_at)


def cancel(job_id: str) -> None:
    """Cancels the job. Idempotent."""
    _slurm("scancel", job_id, may_miss="Invalid job id")


def _state_from_accounting(job_id: str) -> str:
    try:
        output = _slurm("sacct", "-X", "-n", "-P", "-o", "State", "-j", job_id)
    except SlurmError:  # most small clusters have no accounting
        return "GONE"
    return output.split()[0].rstrip("+") if output.split() else "GONE"


def _slurm(*argv: str, may_miss: str = "") -> str:
    """Returns stdout of one of Slurm's commands, or an empty string if its error contains `may_miss`."""
    try:
        completed = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=COMMAND_S, check=False
        )
    except FileNotFoundError as error:
        raise SlurmError(f"{argv[0]} is not in PATH, though sbatch is", "check this machine's Slurm") from error
    except subprocess.TimeoutExpired as error:
        raise SlurmError(f"{argv[0]} did not answer within {COMMAND_S:.0f} s", "try again: is slurmctld up?") from error
    if completed.returncode == 0:
        return completed.stdout
    if may_miss and may_miss in completed.stderr:
        return ""
    message = " ".join(
        line.removeprefix(f"{argv[0]}: ").removeprefix("error: ") for line in completed.stderr.splitlines()
    )
    raise SlurmError(f"{argv[0]}: {message or f'it ended with {completed.returncode}'}")


def _write(path: Path, text: str) -> None:
    """Writes the file atomically, readable by the user alone."""
    with replacing(path, mode=0o600) as file:
        file.write(text.encode())
