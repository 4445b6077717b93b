"""`rollyard slurm`: the service on nodes that Slurm gives, from a login node.

A cluster is known by its folder (--data-dir), which every node must see. `up` writes a batch script there and submits
it; `status` and `down` find the job by what `up` left.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollyard.cli._console import AsJson, CommandError, note, number, plain, print_json, show, table
from rollyard.cli._slurm_job import (
    REACH_S,
    check_disk,
    folder_of,
    found,
    job_object,
    named,
    poll,
    service_of,
    stand,
    told,
    wait_ready,
)

if TYPE_CHECKING:
    from rollyard.fleet.slurm_jobs import SlurmCluster, SlurmJob

slurm = typer.Typer(help="The service as a job of a Slurm cluster: up, status, down.", no_args_is_help=True)

Folder = Annotated[
    Path | None,
    typer.Option("--data-dir", help="The job's folder, seen by all nodes. [default: slurm in the data folder]"),
]


@slurm.command(
    "up", epilog="Example: rollyard slurm up --nodes 4 --partition cpu --time 24:00:00 --engine http://gpu1:8000"
)
def up(
    nodes: Annotated[int, typer.Option(min=1, help="Nodes; the first has the service, too.")] = 1,
    partition: Annotated[str, typer.Option(help="Slurm's, as in sbatch.")] = "",
    account: Annotated[str, typer.Option(help="Slurm's, as in sbatch.")] = "",
    qos: Annotated[str, typer.Option(help="Slurm's, as in sbatch.")] = "",
    time_limit: Annotated[str, typer.Option("--time", help="Slurm's, as in sbatch: 24:00:00.")] = "",
    gres: Annotated[str, typer.Option(help="Slurm's, of each node: gpu:8.")] = "",
    cpus: Annotated[int | None, typer.Option(min=1, help="CPUs of each node. [default: whole nodes]")] = None,
    mem: Annotated[str, typer.Option(help="Memory of each node: 64G.")] = "",
    extra: Annotated[
        list[str] | None, typer.Option("--extra", metavar="LINE", help="'#SBATCH …', as it is; may be repeated.")
    ] = None,
    setup: Annotated[
        list[str] | None,
        typer.Option(
            "--setup", metavar="LINE", help="Shell, on every node first: 'module load apptainer'; may be repeated."
        ),
    ] = None,
    engine: Annotated[
        list[str] | None, typer.Option("--engine", metavar="URL", help="An engine outside; may be repeated.")
    ] = None,
    engine_command: Annotated[
        str, typer.Option(help="An engine in the job: 'vllm serve MODEL --host {host} --port {port}'.")
    ] = "",
    engine_nodes: Annotated[
        int | None, typer.Option(min=1, help="On the first so many nodes, one each. [default: all]")
    ] = None,
    kind: Annotated[str, typer.Option(help="What the engines speak: vllm, sglang, openai or prorl.")] = "",
    model: Annotated[str, typer.Option(help="Model of the engines; else the first they list.")] = "",
    tokenizer: Annotated[str, typer.Option(help="Tokenizer of the engines: a folder or a hub name.")] = "",
    runtime: Annotated[
        list[str] | None,
        typer.Option("--runtime", help="Sandboxes; may be repeated, the first is the default. [default: apptainer]"),
    ] = None,
    store: Annotated[
        str, typer.Option(envvar="ROLLYARD_STORE", help="postgresql://…, or a SQLite file on a disk of the first node.")
    ] = "",
    service_dir: Annotated[
        Path | None, typer.Option(help="What the service keeps. [default: service in --data-dir]")
    ] = None,
    init_slots: Annotated[int | None, typer.Option(min=1, help="Of each node: being set up at once.")] = None,
    run_slots: Annotated[int | None, typer.Option(min=1, help="Of each node: agents at work at once.")] = None,
    eval_slots: Annotated[int | None, typer.Option(min=1, help="Of each node: being scored at once.")] = None,
    ready_slots: Annotated[int | None, typer.Option(min=0, help="Of each node: may wait for RUN.")] = None,
    drain_s: Annotated[float, typer.Option(min=0, help="What RUN and EVAL get when the time is up.")] = 60.0,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Of the service; else by the job's number.")
    ] = None,
    scratch: Annotated[str, typer.Option(help="A short path on each node's own disk.")] = "/tmp/rollyard",
    config: Annotated[Path | None, typer.Option(help="A TOML file with more settings; all nodes must see it.")] = None,
    ray: Annotated[
        bool | None, typer.Option("--ray/--no-ray", help="A fleet on Ray. [default: with several nodes]")
    ] = None,
    requeue: Annotated[bool, typer.Option(help="Come again after preemption and when the time is up.")] = True,
    data_dir: Folder = None,
    wait_s: Annotated[
        float, typer.Option(min=0, help="How long to wait until the service is ready; 0: not at all.")
    ] = 600.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the batch script, and do nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Submit a job that serves rollouts, and wait until it does.

    The script lies in --data-dir as job.sh, with job.log beside it. A job that is preempted, or whose time is up, comes
    again and goes on where it was.
    """
    from rollyard.fleet.slurm import JobSpec, script
    from rollyard.fleet.slurm_jobs import SlurmCluster, look, require_slurm

    folder = folder_of(data_dir)
    slots = {"init_slots": init_slots, "run_slots": run_slots, "eval_slots": eval_slots, "ready_slots": ready_slots}
    about = {"--kind": kind, "--model": model, "--tokenizer": tokenizer}
    if any(about.values()) and not (engine or engine_command):
        raise CommandError("--kind, --model and --tokenizer say something of engines", "name one with --engine", 2)
    runtimes = runtime or ["apptainer"]
    settings = {
        "runtime": runtimes[0],
        "runtimes": ",".join(dict.fromkeys(runtimes)),
        **{name: value for name, value in slots.items() if value is not None},
        **({"config": config.absolute()} if config else {}),
    }
    with told():
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
        require_slurm()
        check_disk(spec, store)
        cluster = SlurmCluster(folder)
        if cluster.job_id and not (job := look(cluster.job_id)).is_over:
            raise CommandError(
                f"job {job.id} of {folder} is there already, {job.state}", f"rollyard slurm down{named(data_dir)}"
            )
        job_id = cluster.submit(spec, store)
        note(f"job {job_id} is submitted: {folder / 'job.sh'}")
        if wait_s:
            wait_ready(cluster, job_id, wait_s)
        _show_up(cluster, look(job_id), as_json)


def _show_up(cluster: SlurmCluster, job: SlurmJob, as_json: bool) -> None:
    if as_json:
        print_json(job_object(cluster, job))
    elif cluster.url:
        note(f"ready at {cluster.url}, token in {cluster.token_file}")
        sys.stdout.write(f"export ROLLYARD_URL={cluster.url} ROLLYARD_TOKEN_FILE={cluster.token_file}\n")


@slurm.command("status", epilog="Example: rollyard slurm status --json")
def status(data_dir: Folder = None, as_json: AsJson = False) -> None:
    """Show the job, its nodes, and what its service says of itself."""
    from rollyard.fleet.slurm_jobs import look

    cluster, job_id = found(data_dir)
    with told():
        job = look(job_id)
    service = service_of(cluster) if cluster.url and not job.is_over else None
    if as_json:
        print_json(job_object(cluster, job, service))
        return
    made = table("job", "state", "for", "nodes", "service", "queued", "live", "ended")
    states: dict[str, Any] = (service or {}).get("states", {})
    live = sum(count for name, count in states.items() if name not in ("queued", "ended"))
    counts = (states.get("queued", 0), live, states.get("ended", 0)) if service else (None, None, None)
    made.add_row(
        *(job.id, plain(stand(job)), job.ran_for or "–", plain(", ".join(job.nodes)) or "–"),
        *(plain(cluster.url) if service else "–", *map(number, counts)),
    )
    show(made)
    if cluster.url and service is None and not job.is_over:
        note(f"{cluster.url} does not answer; see {cluster.folder / 'job.log'}")


@slurm.command("down", epilog="Example: rollyard slurm down --wait-s 300")
def down(
    data_dir: Folder = None,
    wait_s: Annotated[float, typer.Option(min=0, help="What its drain gets; then it is cancelled.")] = 180.0,
    as_json: AsJson = False,
) -> None:
    """Drain the service and end its job. What is unfinished goes on with the next `up`. May be repeated."""
    from rollyard.fleet.slurm_jobs import cancel, look

    cluster, job_id = found(data_dir)
    with told():
        job = look(job_id)
        if not job.is_over:
            note(f"job {job.id} is {job.state}: it is drained and ended")
            cluster.drain(job)
            if not poll(lambda: look(job_id).is_over, wait_s):
                note(f"job {job.id} did not end within {wait_s:g} s; it is cancelled")
                cancel(job_id)
                if not poll(lambda: look(job_id).is_over, wait_s or REACH_S):
                    raise CommandError(
                        f"job {job.id} was cancelled, and is {look(job_id).state} still", "ask again later"
                    )
            job = look(job_id)
    if as_json:
        print_json(job_object(cluster, job))
    else:
        note(f"job {job.id} is {job.state}")
