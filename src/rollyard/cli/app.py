"""The command tree. Each command is defined in its own module and registered here."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Annotated

import typer
from typer.models import CommandInfo

from rollyard.cli._commit import commit
from rollyard.cli.commands.access import access
from rollyard.cli.commands.agents import agents
from rollyard.cli.commands.bench import command as bench
from rollyard.cli.commands.config import config
from rollyard.cli.commands.demo import demo
from rollyard.cli.commands.doctor import doctor
from rollyard.cli.commands.draws import draws
from rollyard.cli.commands.engine import engine
from rollyard.cli.commands.engines import engines
from rollyard.cli.commands.evaluate import evaluate
from rollyard.cli.commands.gym_agent import gym_agent
from rollyard.cli.commands.images import images
from rollyard.cli.commands.init import init
from rollyard.cli.commands.node import node
from rollyard.cli.commands.nodes import nodes
from rollyard.cli.commands.open import open_dashboard
from rollyard.cli.commands.policies import policies
from rollyard.cli.commands.pools import pools
from rollyard.cli.commands.rollouts import rollouts
from rollyard.cli.commands.runs import runs
from rollyard.cli.commands.serve import serve
from rollyard.cli.commands.shell import shell
from rollyard.cli.commands.slurm import slurm
from rollyard.cli.commands.submit import submit
from rollyard.cli.commands.tasks import tasks
from rollyard.cli.commands.tokens import tokens
from rollyard.cli.commands.top import top
from rollyard.cli.commands.view import view
from rollyard.cli.commands.weights import weights
from rollyard.core.version import __version__

app = typer.Typer(
    name="rollyard",
    help="Rollouts for reinforcement learning of LLM agents, as a service.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
    epilog="Start with: rollyard doctor; then: rollyard serve --engine http://gpu1:8000",
)


def _version(is_requested: bool) -> None:
    if is_requested:
        built_from = commit()
        typer.echo(f"rollyard {__version__}" + (f" (commit {built_from})" if built_from else ""))
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and the commit, and exit.", callback=_version, is_eager=True),
    ] = False,
) -> None:
    """Rollouts for reinforcement learning of LLM agents, as a service."""


def _example(line: str) -> str:
    return f"Example: {line}"


app.command(epilog=_example("rollyard serve --engine http://gpu1:8000 --engine http://gpu2:8000 --run-slots 512"))(
    serve
)
app.command("open", short_help="Open the dashboard in a browser.", epilog=_example("rollyard open --print"))(
    open_dashboard
)
app.command(epilog=_example("rollyard submit tasks.jsonl --group-size 8 --out trajectories.jsonl"))(submit)
app.command(
    "eval",
    short_help="Report pass@1 to pass@K, with intervals.",
    epilog=_example("rollyard eval tasks.jsonl --k 8 --engine http://gpu1:8000"),
)(evaluate)
app.command(short_help="Write a small project with an environment.", epilog=_example("rollyard init my-project"))(init)
app.add_typer(tasks, name="tasks", epilog=_example("rollyard tasks validate tasks.jsonl --run"))
app.add_typer(rollouts, name="rollouts", epilog=_example("rollyard rollouts list --state ended --limit 20"))
app.add_typer(engines, name="engines", epilog=_example("rollyard engines add http://gpu1:8000 --policy actor"))
app.add_typer(policies, name="policies", epilog=_example("rollyard policies pause actor --mode drain"))
app.command(
    short_help="Run rollouts leased by a head.",
    epilog=_example("rollyard node --head https://head:8127 --token-file node-token"),
)(node)
app.add_typer(nodes, name="nodes", epilog=_example("rollyard nodes drain gpu-07"))
app.add_typer(
    access,
    name="access",
    short_help="Tokens, their quotas, and the audit log.",
    epilog=_example("rollyard access create trainer --name alice"),
)
app.add_typer(agents, name="agents", epilog=_example("rollyard agents try mini-swe-agent"))
app.add_typer(
    images,
    name="images",
    short_help="Sandbox images on this machine.",
    epilog=_example("rollyard images pull docker://ubuntu:24.04"),
)
app.add_typer(pools, name="pools", epilog=_example("rollyard pools resize --run 512"))
app.add_typer(runs, name="runs", epilog=_example("rollyard runs create grpo-7b --policy actor --seed 7"))
app.add_typer(draws, name="draws", epilog=_example("rollyard draws show grpo-7b"))
app.add_typer(tokens, name="tokens", epilog=_example("rollyard tokens check Qwen/Qwen3-0.6B"))
app.command(
    short_help="Serve a small model on this machine.",
    epilog=_example("rollyard engine --model ~/models/qwen3-0.6b --port 8000"),
)(engine)
app.add_typer(weights, name="weights", epilog=_example("rollyard weights fetch smollm2"))
app.add_typer(
    slurm,
    name="slurm",
    epilog=_example("rollyard slurm up --nodes 4 --time 24:00:00 --store postgresql://me@db/rollyard"),
)
app.command(
    "gym-agent",
    short_help="Serve rollouts to NeMo Gym and NeMo RL.",
    epilog=_example("rollyard gym-agent --port 8130 --server counter"),
)(gym_agent)
app.command(epilog=_example("rollyard top --interval 0.5"))(top)
app.command(
    short_help="Open a file of trajectories in the browser.", epilog=_example("rollyard view trajectories.jsonl")
)(view)
app.command(epilog=_example("rollyard shell tasks.jsonl:3 --eval"))(shell)
app.command(short_help="Check this machine, with fixes for problems.", epilog=_example("rollyard doctor --json"))(
    doctor
)
app.command(
    "bench",
    short_help="Measure this machine, beside the peers.",
    epilog=_example("rollyard bench shell --quick --json"),
)(bench)
app.command(short_help="Watch a small trained model solve tasks.", epilog=_example("rollyard demo"))(demo)
app.command(epilog=_example("rollyard config --config rollyard.toml"))(config)


def app_for(arguments: Sequence[str]) -> typer.Typer:
    """Returns the tree, reduced to the command that `arguments` start with. Typer prepares every parameter of every
    command that it is given, which takes longer than most commands."""
    name = arguments[0] if arguments else ""
    commands = [command for command in app.registered_commands if _name_of(command) == name]
    groups = [group for group in app.registered_groups if group.name == name]
    if not commands and not groups:
        return app
    reduced = copy.copy(app)
    reduced.registered_commands, reduced.registered_groups = commands, groups
    return reduced


def _name_of(command: CommandInfo) -> str:
    return command.name or (command.callback.__name__ if command.callback else "")
