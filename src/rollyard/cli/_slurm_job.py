"""Shared by the commands of `rollyard slurm`: waits for a job, queries its service, and reports errors.

Slurm does not notify of a job's state, so it is polled every few seconds, as by `sbatch --wait`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollyard.cli._console import CommandError, connect, note, run

if TYPE_CHECKING:
    from rollyard.fleet.slurm import JobSpec
    from rollyard.fleet.slurm_jobs import SlurmCluster, SlurmJob

POLL_S = 2.0
REACH_S = 30.0
"""How long a service that has written its URL to the folder may take to answer this machine."""


def folder_of(data_dir: Path | None) -> Path:
    from rollyard.core.paths import data_home

    return (data_dir.expanduser() if data_dir else data_home(os.environ) / "slurm").absolute()


def option_for(data_dir: Path | None) -> str:
    """Returns the option, for a suggested command."""
    return f" --data-dir {data_dir}" if data_dir else ""


def get_job(data_dir: Path | None) -> tuple[SlurmCluster, str]:
    """Returns the cluster and the id of its job."""
    from rollyard.fleet.slurm_jobs import SlurmCluster, require_slurm

    cluster = SlurmCluster(folder_of(data_dir))
    with translated_errors():
        require_slurm()
        if job_id := cluster.job_id:
            return cluster, job_id
    raise CommandError(f"no job was submitted from {cluster.folder}", f"rollyard slurm up{option_for(data_dir)}")


def wait_ready(cluster: SlurmCluster, job_id: str, data_dir: Path | None, wait_s: float) -> None:
    """Waits until the service is ready. Raises `CommandError` with the reason if the job ends or cannot start."""
    from rollyard.fleet.slurm_jobs import read_job

    folder = option_for(data_dir)
    last_line = ""

    def is_ready() -> bool:
        nonlocal last_line
        if cluster.url:
            return True
        job = read_job(job_id)
        if job.is_over:
            log = cluster.log_end()
            ends = f"; its log ends: {log}" if log else ""
            raise CommandError(f"job {job_id} is {job.state}{ends}", f"see {cluster.folder / 'job.log'}")
        if job.is_hopeless:
            what = f"job {job_id} cannot start ({job.reason}); it stays in the queue"
            raise CommandError(what, f"end it with `rollyard slurm down{folder}`, and change the options")
        line = f"job {job_id} is {state_text(job)}" + (f" on {', '.join(job.nodes)}" if job.nodes else "")
        if line != last_line:
            note(line)
            last_line = line
        return False

    if not poll(is_ready, wait_s):
        raise CommandError(f"after {wait_s:g} s {last_line}; the job remains", f"see `rollyard slurm status{folder}`")
    if not poll(lambda: service_of(cluster) is not None, REACH_S):
        note(f"{cluster.url} cannot be reached from this machine; the cluster's nodes may reach it")


def state_text(job: SlurmJob) -> str:
    """Returns the job's state, and the reason if it waits."""
    return job.state + (f" ({job.reason})" if job.is_waiting and job.reason else "")


def check_disk(spec: JobSpec, store: str) -> None:
    """Raises `CommandError` if the service's folder is on a network disk: SQLite and sandboxes need a local one."""
    from rollyard.store.sqlite.place import NETWORK, mount_of

    needs = "sandboxes" if not spec.uses_ray else "" if store else "its SQLite file"
    mount = mount_of(str(spec.service_dir.resolve()), mounts())
    if needs and mount is not None and mount.kind in NETWORK:
        raise CommandError(
            f"{spec.service_dir} is on a network file system ({mount.kind}), which does not support {needs}",
            "--ray --store postgresql://…; or --service-dir on a disk of the first node, which must then stay the same",
        )


def mounts() -> str:
    return Path("/proc/self/mountinfo").read_text(errors="surrogateescape")


def service_of(cluster: SlurmCluster) -> dict[str, Any] | None:
    """Returns the service's status; None if it does not answer."""
    from rollyard.core.failure import RollyardError

    async def fetch_status() -> dict[str, Any]:
        async with connect(cluster.url, cluster.token_file.read_text().strip()) as client:
            return dict(await client.status())

    try:
        return run(fetch_status()) if cluster.url else None
    except (RollyardError, OSError, TimeoutError):
        return None


def job_object(cluster: SlurmCluster, job: SlurmJob, service: dict[str, Any] | None = None) -> dict[str, Any]:
    return {
        "job_id": job.id,
        "state": job.state,
        "reason": job.reason,
        "nodes": list(job.nodes),
        "url": cluster.url,
        "token_file": str(cluster.token_file),
        "data_dir": str(cluster.folder),
        "service": service,
    }


def poll(condition: Callable[[], bool], within_s: float) -> bool:
    until = time.monotonic() + within_s
    while not condition():
        if time.monotonic() >= until:
            return False
        time.sleep(min(POLL_S, within_s))
    return True


@contextmanager
def translated_errors() -> Generator[None, None, None]:
    """Converts a `SlurmError` to a `CommandError`."""
    from rollyard.fleet.slurm import SlurmError

    try:
        yield
    except SlurmError as error:
        raise CommandError(error.what, error.remedy, 2 if error.is_usage else 1) from error
