"""`rollyard tokens`: reports the properties of a model's tokenizer and chat template, before training."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from rollyard.cli._console import AsJson, CommandError, note, plain, print_json, show, table
from rollyard.core.failure import InvalidRequest, RollyardError

tokens = typer.Typer(help="Tokenizers and chat templates: check.", no_args_is_help=True)

_COLORS = {"ok": "green", "no": "red", "does not apply": "dim"}


@tokens.command("check", epilog="Example: rollyard tokens check Qwen/Qwen3-0.6B --renderer template")
def check(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A tokenizer's folder, or a hub name that is cached.")],
    renderer: Annotated[str, typer.Option(help="The renderer to try, as engines name it; else the model's own.")] = "",
    as_json: AsJson = False,
) -> None:
    """Report the properties of a tokenizer and its chat template: what extends exactly, and what does not.

    The exit status is 0 whatever the properties are: this is a description, not a test.
    """
    from rollyard.tokens import Tokenizers, load_renderer
    from rollyard.tokens.properties import properties_of

    try:
        tokenizer = Tokenizers().load(model)
    except RollyardError:
        raise
    except Exception as error:  # the library raises various errors for a broken tokenizer.json
        raise CommandError(f"the tokenizer of {model} cannot be read: {error}", "fetch its files again") from error
    try:
        chosen, reason = load_renderer(tokenizer, model, renderer), ""
    except InvalidRequest as error:
        if renderer:
            raise
        chosen, reason = None, error.detail
    properties = properties_of(tokenizer, chosen)
    name = chosen.name if chosen is not None else None
    if as_json:
        print_json(
            {"model": model, "renderer": name, "reason": reason, "properties": [asdict(item) for item in properties]}
        )
        return
    note(f"{model}: rendered by {name}" if name else f"{model}: {reason}")
    grid = table("property", "", "observation")
    for item in properties:
        grid.add_row(item.name, f"[{_COLORS[item.verdict]}]{item.verdict}[/]", plain(item.says))
    show(grid)
