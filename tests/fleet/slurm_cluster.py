"""A real Slurm on this machine: munged, slurmctld and two slurmd, in their own network, PID and mount namespaces.

It has two nodes with their own addresses (10.99.0.1 and .2, on the namespace's loopback: nothing leaves it), a
partition `low` whose jobs are preempted by those of `high`, and everything below one folder. Whatever runs in there
ends with it. A test acts like a person at a login node: it runs commands inside. A requeued job waits until the
credentials of its first start have expired, which takes two minutes elsewhere and seconds here.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

NODES = {"n1": "10.99.0.1", "n2": "10.99.0.2"}
TOOLS = ("sbatch", "slurmctld", "slurmd", "munged", "unshare", "nsenter", "ip")
START_S = 30.0

CONF = """
ClusterName=yard
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort=16817
SlurmUser=root
SlurmdUser=root
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=2
KillWait=15
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{nodes}
PartitionName=low Nodes=ALL Default=YES State=UP PriorityTier=1 PreemptMode=REQUEUE
PartitionName=high Nodes=ALL State=UP PriorityTier=10
PartitionName=short Nodes=ALL State=UP MaxTime=1
"""

INIT = """
ip link set lo up
{addresses}
munged --foreground --force --key-file=$F/munge.key --socket=$F/munge.socket --pid-file=$F/munge.pid \
  --log-file=$F/munge.log --seed-file=$F/munge.seed &
until [ -S $F/munge.socket ]; do sleep 0.05; done
slurmctld -D -c &
for name in {names}; do slurmd -D -N $name & done
wait
"""


@dataclass
class SlurmCluster:
    """Runs commands as on its login node."""

    folder: Path
    pid: int
    scratch: str = field(default_factory=lambda: f"/tmp/ry-{secrets.token_hex(3)}")  # short: Ray has sockets there

    def argv(self, *words: object) -> list[str]:
        return ["nsenter", f"--target={self.pid}", "--net", "--pid", "--mount", "--", *(str(word) for word in words)]

    def environ(self) -> Mapping[str, str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("ROLLYARD_", "SLURM"))}
        return {**inherited, "SLURM_CONF": str(self.folder / "slurm.conf"), "HOME": str(self.folder), "COLUMNS": "200"}

    def run(self, *words: object, timeout_s: float = 200.0) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.argv(*words),
            env=self.environ(),
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def rollyard(self, *words: object, timeout_s: float = 200.0) -> subprocess.CompletedProcess[str]:
        return self.run(sys.executable, "-m", "rollyard", *words, timeout_s=timeout_s)

    def object(self, *words: object) -> dict[str, Any]:
        """Returns the output of a command with --json."""
        completed = self.rollyard(*words, "--json")
        assert completed.returncode == 0, completed.stderr
        return json.loads(completed.stdout)

    def state(self, job_id: str) -> str:
        return self.run("squeue", "--noheader", "--states=all", f"--jobs={job_id}", "--format=%T").stdout.strip()

    def service(self, name: str, nodes: int = 0) -> dict[str, Any]:
        """Returns the status of the job in that folder, once its service answers and has so many nodes."""
        status: dict[str, Any] = {}

        def has_come() -> bool:
            status.update(self.object("slurm", "status", "--data-dir", self.folder / name))
            return status["service"] is not None and len(status["service"].get("nodes", ())) >= nodes

        wait_for((self.folder / name / "url").exists, f"the address of {name}")
        wait_for(has_come, f"the service of {name}", every_s=1.5)  # a command takes half a second of CPU time
        return status

    def end_all(self) -> None:
        self.run("scancel", "--state=PENDING", "--full", "--user=root")
        self.run("scancel", "--user=root")
        wait_for(lambda: not self.run("squeue", "--noheader").stdout.strip(), "all jobs to end")


def wait_for(has_come: Callable[[], object], what: str, within_s: float = 180.0, *, every_s: float = 0.2) -> None:
    """Polls, because Slurm has no event for the next state of a job."""
    until = time.monotonic() + within_s
    while not has_come():
        assert time.monotonic() < until, f"waited {within_s:g} s for {what}"
        time.sleep(every_s)


@contextmanager
def slurm_cluster(folder: Path) -> Generator[SlurmCluster, None, None]:
    """A cluster that is ready for jobs. Skips with the reason if it cannot be started."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"no {', '.join(missing)} here: apt-get install slurm-wlm munge")
    unshare = ["unshare", "--net", "--pid", "--mount-proc", "--fork", "--kill-child"]
    if subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("a Slurm of its own needs root, and namespaces")
    _configure(folder)
    environ = {**os.environ, "F": str(folder), "SLURM_CONF": str(folder / "slurm.conf")}
    with (folder / "daemons.log").open("w") as log:
        holder = subprocess.Popen([*unshare, "bash", folder / "init.sh"], env=environ, stdout=log, stderr=log)
    cluster: SlurmCluster | None = None
    try:
        wait_for(lambda: _child(holder.pid), "the namespaces", START_S)
        cluster = SlurmCluster(folder, int(_child(holder.pid)))
        sinfo = ("sinfo", "--noheader", "--partition=low", "--Node", "--format=%T")
        wait_for(lambda: cluster.run(*sinfo).stdout.split() == ["idle"] * len(NODES), "slurmd", START_S)
        yield cluster
    finally:
        holder.send_signal(signal.SIGKILL)  # its child is PID 1 of the namespace: everything ends with it
        holder.wait()
        for leftover in Path("/tmp").glob(f"{Path(cluster.scratch).name}-*") if cluster else ():
            shutil.rmtree(leftover, ignore_errors=True)


def _configure(folder: Path) -> None:
    (folder / "state").mkdir()
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o400)
    nodes = (
        f"NodeName={name} NodeHostname=localhost NodeAddr={address} Port={16821 + i} CPUs=2"
        for i, (name, address) in enumerate(NODES.items())
    )
    (folder / "slurm.conf").write_text(CONF.format(folder=folder, nodes="\n".join(nodes)))
    addresses = "\n".join(f"ip address add {address}/32 dev lo" for address in NODES.values())
    (folder / "init.sh").write_text(INIT.format(addresses=addresses, names=" ".join(NODES)))


def _child(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/task/{pid}/children").read_text().strip()
    except OSError:
        return ""
