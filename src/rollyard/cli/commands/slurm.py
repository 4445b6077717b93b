"""`rollyard slurm`: runs the service as a Slurm job, from a login node.

A cluster is identified by its folder (--data-dir), which all nodes must share. `up` writes a batch script there and
submits it; `status` and `down` find the job by the files of `up`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollyard.cli._console import AsJson, CommandError, note, number, plain, print_json, show, table
from rollyard.cli._extras import require
from rollyard.cli._slurm_job import (
    REACH_S,
    check_disk,
    folder_of,
    get_job,
    job_object,
    option_for,
    poll,
    service_of,
    state_text,
    translated_errors,
    wait_ready,
)

if TYPE_CHECKING:
    from rollyard.fleet.slurm_jobs import SlurmCluster, SlurmJob

slurm = typer.Typer(help="The service as a job of a Slurm cluster: up, status, down.", no_args_is_help=True)

Folder = Annotated[
    Path | None,
    typer.Option("--data-dir", help="The job's folder, shared by all nodes. [default: slurm in the data folder]"),
]


@slurm.command(
    "up",
    epilog="Example: rollyard slurm up --nodes 4 --time 24:00:00 --engine http://gpu1:8000 --store postgresql://me@db/rollyard",
)
def up(
    nodes: Annotated[int, typer.Option(min=1, help="Number of nodes; the first also runs the service.")] = 1,
    partition: Annotated[str, typer.Option(help="As in sbatch.")] = "",
    account: Annotated[str, typer.Option(help="As in sbatch.")] = "",
    qos: Annotated[str, typer.Option(help="As in sbatch.")] = "",
    time_limit: Annotated[str, typer.Option("--time", help="As in sbatch: 24:00:00.")] = "",
    gres: Annotated[str, typer.Option(help="As in sbatch, per node: gpu:8.")] = "",
    cpus: Annotated[int | None, typer.Option(min=1, help="CPUs per node. [default: whole nodes]")] = None,
    mem: Annotated[str, typer.Option(help="Memory per node: 64G.")] = "",
    extra: Annotated[
        list[str] | None, typer.Option("--extra", metavar="LINE", help="An '#SBATCH …' line to add; may be repeated.")
    ] = None,
    setup: Annotated[
        list[str] | None,
        typer.Option(
            "--setup",
            metavar="LINE",
            help="Shell command to run first on every node: 'module load apptainer'; may be repeated.",
        ),
    ] = None,
    engine: Annotated[
        list[str] | None, typer.Option("--engine", metavar="URL", help="An engine outside the job; may be repeated.")
    ] = None,
    engine_command: Annotated[
        str, typer.Option(help="Start an engine in the job: a command with {host} and {port} (docs/how-to/slurm.md).")
    ] = "",
    engine_nodes: Annotated[
        int | None, typer.Option(min=1, help="Start it on the first N nodes, one each. [default: all]")
    ] = None,
    kind: Annotated[str, typer.Option(help="API of the engines: vllm, sglang, openai or prorl.")] = "",
    model: Annotated[str, typer.Option(help="Model of the engines; else the first they list.")] = "",
    tokenizer: Annotated[str, typer.Option(help="Tokenizer of the engines: a folder or a hub name.")] = "",
    runtime: Annotated[
        list[str] | None,
        typer.Option(
            "--runtime", help="Sandbox runtime; may be repeated, the first is the default. [default: apptainer]"
        ),
    ] = None,
    store: Annotated[
        str, typer.Option(envvar="ROLLYARD_STORE", help="postgresql://…, or a SQLite file on a disk of the first node.")
    ] = "",
    service_dir: Annotated[
        Path | None, typer.Option(help="The service's data folder. [default: service in --data-dir]")
    ] = None,
    init_slots: Annotated[int | None, typer.Option(min=1, help="Rollouts in INIT at once, per node.")] = None,
    run_slots: Annotated[int | None, typer.Option(min=1, help="Rollouts in RUN at once, per node.")] = None,
    eval_slots: Annotated[int | None, typer.Option(min=1, help="Rollouts in EVAL at once, per node.")] = None,
    ready_slots: Annotated[int | None, typer.Option(min=0, help="Rollouts in READY at once, per node.")] = None,
    drain_s: Annotated[float, typer.Option(min=0, help="Seconds for RUN and EVAL to end at the time limit.")] = 60.0,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Port of the service; else derived from the job's number.")
    ] = None,
    scratch: Annotated[str, typer.Option(help="A short path on each node's local disk.")] = "/tmp/rollyard",
    config: Annotated[Path | None, typer.Option(help="A TOML file with more settings, shared by all nodes.")] = None,
    ray: Annotated[
        bool | None, typer.Option("--ray/--no-ray", help="Run a fleet on Ray. [default: with several nodes]")
    ] = None,
    requeue: Annotated[bool, typer.Option(help="Requeue the job after preemption and at the time limit.")] = True,
    data_dir: Folder = None,
    wait_s: Annotated[
        float, typer.Option(min=0, help="Seconds to wait until the service is ready; 0: do not wait.")
    ] = 600.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the batch script without submitting it.")] = False,
    as_json: AsJson = False,
) -> None:
    """Submit a job that runs the service, and wait until it is ready.

    The script is job.sh in --data-dir, with job.log beside it. A job that is preempted or reaches its time limit is
    requeued and continues where it stopped.
    """
    from rollyard.fleet.slurm import JobSpec, script
    from rollyard.fleet.slurm_jobs import SlurmCluster, read_job, require_slurm

    folder = folder_of(data_dir)
    slots = {"init_slots": init_slots, "run_slots": run_slots, "eval_slots": eval_slots, "ready_slots": ready_slots}
    about = {"--kind": kind, "--model": model, "--tokenizer": tokenizer}
    if any(about.values()) and not (engine or engine_command):
        raise CommandError("--kind, --model and --tokenizer need an engine", "give one with --engine", 2)
    runtimes = runtime or ["apptainer"]
    settings = {
        "runtime": runtimes[0],
        "runtimes": ",".join(dict.fromkeys(runtimes)),
        **{name: value for name, value in slots.items() if value is not None},
        **({"config": config.absolute()} if config else {}),
    }
    with translated_errors():
        spec = JobSpec(
            folder=folder,
            python=Path(sys.executable).absolute(),
            service_dir=service_dir.absolute() if service_dir else folder / "service",
            nodes=nodes,
            partition=partition,
            account=account,
            qos=qos,
            time=time_limit,
            gres=gres,
            cpus=cpus,
            mem=mem,
            extra=tuple(extra or ()),
            setup=tuple(setup or ()),
            engines=tuple(engine or ()),
            engine_command=engine_command,
            engine_nodes=engine_nodes,
            serve_options=tuple(word for name, value in about.items() if value for word in (name, value)),
            settings=settings,
            scratch=scratch,
            port=port,
            drain_s=drain_s,
            uses_ray=nodes > 1 if ray is None else ray,
            is_requeued=requeue,
        )
        if dry_run:
            text = script(spec)
            print_json({"script": text}) if as_json else sys.stdout.write(text)
            return
        if spec.uses_ray:  # the nodes run this Python
            require("ray")
        if store.startswith("postgres"):
            require("postgres")
        require_slurm()
        check_disk(spec, store)
        cluster = SlurmCluster(folder)
        if cluster.job_id and not (job := read_job(cluster.job_id)).is_over:
            raise CommandError(
                f"job {job.id} of {folder} exists already, {job.state}", f"rollyard slurm down{option_for(data_dir)}"
            )
        job_id = cluster.submit(spec, store)
        note(f"job {job_id} is submitted: {folder / 'job.sh'}")
        if wait_s:
            wait_ready(cluster, job_id, data_dir, wait_s)
        _show_up(cluster, read_job(job_id), as_json)


def _show_up(cluster: SlurmCluster, job: SlurmJob, as_json: bool) -> None:
    if as_json:
        print_json(job_object(cluster, job))
    elif cluster.url:
        note(f"ready at {cluster.url}, token in {cluster.token_file}")
        sys.stdout.write(f"export ROLLYARD_URL={cluster.url} ROLLYARD_TOKEN_FILE={cluster.token_file}\n")


@slurm.command("status", epilog="Example: rollyard slurm status --json")
def status(data_dir: Folder = None, as_json: AsJson = False) -> None:
    """Show the job, its nodes, and the status of its service."""
    from rollyard.fleet.slurm_jobs import read_job

    cluster, job_id = get_job(data_dir)
    with translated_errors():
        job = read_job(job_id)
    service = service_of(cluster) if cluster.url and not job.is_over else None
    if as_json:
        print_json(job_object(cluster, job, service))
        return
    grid = table("job", "state", "for", "nodes", "service", "queued", "live", "ended")
    states: dict[str, Any] = (service or {}).get("states", {})
    live = sum(count for name, count in states.items() if name not in ("queued", "ended"))
    counts = (states.get("queued", 0), live, states.get("ended", 0)) if service else (None, None, None)
    grid.add_row(
        *(job.id, plain(state_text(job)), job.ran_for or "–", plain(", ".join(job.nodes)) or "–"),
        *(plain(cluster.url) if service else "–", *map(number, counts)),
    )
    show(grid)
    if cluster.url and service is None and not job.is_over:
        note(f"{cluster.url} does not answer; see {cluster.folder / 'job.log'}")


@slurm.command("down", epilog="Example: rollyard slurm down --wait-s 300")
def down(
    data_dir: Folder = None,
    wait_s: Annotated[float, typer.Option(min=0, help="Seconds for the drain; then the job is cancelled.")] = 180.0,
    as_json: AsJson = False,
) -> None:
    """Drain the service and end its job. Unfinished rollouts continue with the next `up`. May be repeated."""
    from rollyard.fleet.slurm_jobs import cancel, read_job

    cluster, job_id = get_job(data_dir)
    with translated_errors():
        job = read_job(job_id)
        if not job.is_over:
            note(f"job {job.id} is {job.state}: it will be drained and ended")
            cluster.drain(job)
            if not poll(lambda: read_job(job_id).is_over, wait_s):
                note(f"job {job.id} did not end within {wait_s:g} s; cancelling it")
                cancel(job_id)
                if not poll(lambda: read_job(job_id).is_over, wait_s or REACH_S):
                    raise CommandError(
                        f"job {job.id} was cancelled, but is still {read_job(job_id).state}", "try again later"
                    )
            job = read_job(job_id)
    if as_json:
        print_json(job_object(cluster, job))
    else:
        note(f"job {job.id} is {job.state}")
