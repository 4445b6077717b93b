"""`rollyard slurm` against a real Slurm: a job is submitted, serves rollouts, is preempted, continues, and ends.

Every rollout runs `env` in its sandbox and succeeds only if no variable of the job is in there.
"""

import json
import shutil
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from tests.fleet.slurm_cluster import NODES, SlurmCluster, slurm_cluster, wait_for

pytestmark = [pytest.mark.xdist_group("slurm"), pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
RUNTIME = "apptainer" if shutil.which("apptainer") else "bubblewrap"
"""Of the jobs: the default of `slurm up`, where it is installed."""
CHECK = "test -s env.txt && ! grep -E '^(SLURM|SBATCH|SRUN|PMI)' env.txt"


def call(name: str, **arguments: str) -> str:
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>"


SCRIPT = {"rules": [], "default": [call("shell", command="sleep 1; env > env.txt"), call("finish")]}
TASK = {"environment": "shell", "data": {"instruction": "look around", "checks": [CHECK]}}


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Generator[SlurmCluster, None, None]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        (cluster.folder / "script.json").write_text(json.dumps(SCRIPT))
        yield cluster


@pytest.fixture(autouse=True)
def no_job_is_left(slurm: SlurmCluster) -> Generator[None, None, None]:
    yield
    slurm.end_all()


def small(slurm: SlurmCluster, name: str, *more: object) -> tuple[object, ...]:
    """`up` with few slots, sandboxes that this machine has, and the scripted engine on each node."""
    engine = (
        f"cd {ROOT} && exec {sys.executable} -m tests.fleet.slurm_engine {{host}} {{port}} {slurm.folder}/script.json"
    )
    slots = ("--init-slots", 2, "--run-slots", 4, "--eval-slots", 2, "--ready-slots", 2, "--drain-s", 20)
    places = ("--data-dir", slurm.folder / name, "--scratch", slurm.scratch)
    return ("slurm", "up", *slots, *places, "--runtime", RUNTIME, "--engine-command", engine, *more)


def submit(slurm: SlurmCluster, at: dict[str, Any], count: int, prefix: str, *more: object) -> list[dict[str, Any]]:
    tasks = slurm.folder / f"{prefix}.jsonl"
    tasks.write_text("".join(json.dumps(TASK) + "\n" for _ in range(count)))
    token = Path(at["token_file"]).read_text().strip()
    completed = slurm.rollyard(
        *("submit", tasks, "--id-prefix", prefix, "--json", "--url", at["url"], "--token", token, *more)
    )
    records = [json.loads(line) for line in completed.stdout.splitlines()]
    failures = [(record["id"], record["failure"], record["lost"]) for record in records if record.get("failure")]
    assert completed.returncode == 0, f"{completed.stderr}\n{failures[:3]}"
    return records


def some_run(slurm: SlurmCluster) -> None:
    wait_for(lambda: slurm.run("pgrep", "-f", "^sleep 1$").returncode == 0, "a rollout to run")


def log(slurm: SlurmCluster, name: str) -> str:
    return (slurm.folder / name / "job.log").read_text()


def test_a_service_continues_after_preemption_its_time_limit_and_resubmission(slurm: SlurmCluster):
    """One service: preempted, drained when its time is up, taken down while rollouts run, submitted again."""
    up = slurm.object(*small(slurm, "yard", "--partition", "low"))
    assert up["state"] == "RUNNING" and up["url"].startswith(f"http://{NODES[up['nodes'][0]]}:")

    again = slurm.rollyard("slurm", "up", "--data-dir", slurm.folder / "yard")
    assert again.returncode == 1 and f"job {up['job_id']} of" in again.stderr and "exists already" in again.stderr

    submit(slurm, up, 12, "across", "--no-wait")
    some_run(slurm)
    both = slurm.run(
        "sbatch", "--parsable", "--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 3"
    )
    assert both.returncode == 0, both.stderr
    back = come_again(slurm, up, 1)
    assert back["service"]["epoch"] == 2
    records = submit(slurm, back, 12, "across")
    assert [record["reward"] for record in records] == [1.0] * 12
    assert any(record["lost"] for record in records), "the preemption hit nothing"

    submit(slurm, back, 6, "timed", "--no-wait")
    slurm.run("scancel", "--signal=USR1", "--batch", up["job_id"])  # as Slurm does some time before the end
    back = come_again(slurm, up, 2)
    records = submit(slurm, back, 6, "timed")
    assert [record["reward"] for record in records] == [1.0] * 6

    shown = slurm.rollyard("slurm", "status", "--data-dir", slurm.folder / "yard").stdout
    assert "RUNNING" in shown and back["url"] in shown

    submit(slurm, back, 6, "again", "--no-wait")
    down = slurm.object("slurm", "down", "--data-dir", slurm.folder / "yard")
    assert (down["state"], down["url"]) == ("COMPLETED", "")
    first, later = log(slurm, "yard").split("started 1 times before")
    second, third = later.split("started 2 times before")
    assert "Slurm ends the job" in first and "the service ended with 0" in first
    assert second.index("draining") < second.index("the service ended with 0") < second.index("the job is queued again")
    assert third.index("draining") < third.index("the service ended with 0") and "queued again" not in third
    assert slurm.object("slurm", "down", "--data-dir", slurm.folder / "yard")["state"] == "COMPLETED"

    next_up = slurm.object(*small(slurm, "yard"))
    assert next_up["job_id"] != up["job_id"] and next_up["token_file"] == up["token_file"]
    records = submit(slurm, next_up, 6, "again")
    assert [record["reward"] for record in records] == [1.0] * 6


def come_again(slurm: SlurmCluster, up: dict[str, Any], times: int) -> dict[str, Any]:
    """Returns the same job, once it was started so many times before and its service answers."""
    wait_for(lambda: f"started {times} times before" in log(slurm, "yard"), "the job to come again", 120)
    back = slurm.service("yard")
    assert back["job_id"] == up["job_id"]
    return back


def test_a_job_that_is_stopped_before_its_service_starts_ends(slurm: SlurmCluster):
    folder = ("--data-dir", slurm.folder / "early")
    up = slurm.object(*small(slurm, "early", "--wait-s", 0))
    job_log = slurm.folder / "early" / "job.log"
    wait_for(lambda: job_log.exists() and "started 0 times before" in job_log.read_text(), "the job to begin")
    down = slurm.object("slurm", "down", *folder)
    assert (down["job_id"], down["state"], down["url"]) == (up["job_id"], "COMPLETED", "")


def test_several_nodes_are_a_fleet_on_ray_and_continue_after_a_requeue(slurm: SlurmCluster):
    folder = ("--data-dir", slurm.folder / "fleet")
    up = slurm.object(*small(slurm, "fleet", "--nodes", 2))
    assert up["nodes"] == list(NODES)
    slurm.service("fleet", nodes=2)
    submit(slurm, up, 16, "across", "--no-wait")
    some_run(slurm)
    slurm.run("scontrol", "requeue", up["job_id"])
    wait_for(lambda: "started 1 times before" in log(slurm, "fleet"), "the job to come again", 90)
    back = slurm.service("fleet")
    records = submit(slurm, back, 16, "across")
    assert [record["reward"] for record in records] == [1.0] * 16
    assert any(record["lost"] for record in records), "the requeue hit nothing"

    assert slurm.object("slurm", "down", *folder)["state"] == "COMPLETED"
    wait_for(lambda: slurm.run("pgrep", "-f", "raylet|gcs_server").returncode, "Ray to end")
    assert not Path(f"{slurm.scratch}-{up['job_id']}").exists()


def test_a_job_that_cannot_run_reports_why(slurm: SlurmCluster):
    def up(name: str, *more: object) -> str:
        completed = slurm.rollyard("slurm", "up", "--data-dir", slurm.folder / name, *more)
        assert (completed.returncode, completed.stdout) == (1, ""), completed
        return completed.stderr.splitlines()[-1]

    assert "sbatch: " in (error := up("nowhere", "--partition", "nowhere")) and "invalid partition" in error
    assert "(PartitionTimeLimit)" in up("long", "--partition", "short", "--time", "10:00")
    error = up("broken", "--setup", "echo the module is not there; exit 3")
    assert "is FAILED; its log ends: the module is not there" in error and "job.log" in error

    slurm.run("sbatch", "--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 300")
    error = up("queued", "--wait-s", 4)
    assert "is PENDING (" in error and "the job remains" in error
    down = slurm.object("slurm", "down", "--data-dir", slurm.folder / "queued")
    assert down["state"] == "CANCELLED"

    never = slurm.rollyard("slurm", "down", "--data-dir", slurm.folder / "never")
    assert never.returncode == 1 and "no job was submitted" in never.stderr
