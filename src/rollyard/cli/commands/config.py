"""`rollyard config`: the effective settings on this machine, and the source of each value."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from rollyard.cli._console import AsJson, plain, print_json, show, table

MASK = "********"


def config(
    file: Annotated[
        Path | None, typer.Option("--config", help="The TOML file; else $ROLLYARD_CONFIG, else ./rollyard.toml.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print every setting with its value, source and description.

    Flags of `rollyard serve` override ROLLYARD_* variables, which override the TOML file. Secrets are not shown.
    """
    from rollyard.service.settings import Settings, load_settings
    from rollyard.store.opening import shown

    loaded = load_settings({}, os.environ, file)
    values = {name: masked(getattr(loaded.settings, name)) for name in Settings.model_fields}
    values["store"] = shown(loaded.settings.store)
    values["token_file"] = str(loaded.settings.token_path)
    if as_json:
        print_json({name: {"value": value, "source": loaded.sources[name]} for name, value in values.items()})
        return
    grid = table("setting", "value", "source", "description")
    for name, field in Settings.model_fields.items():
        source = loaded.sources[name]
        value = plain(_text(values[name]))
        grid.add_row(
            name, value if source == "default" else f"[bold]{value}[/]", plain(source), plain(field.description or "")
        )
    show(grid)


def masked(value: Any) -> Any:
    """Returns a setting as a JSON value, without secrets."""
    from pydantic import BaseModel, SecretStr

    if isinstance(value, SecretStr):
        return MASK if value.get_secret_value() else ""
    if isinstance(value, BaseModel):
        return {name: masked(getattr(value, name)) for name in type(value).model_fields}
    if isinstance(value, list | tuple):
        return [masked(item) for item in value]
    if isinstance(value, dict):
        return {name: masked(item) for name, item in value.items()}
    return str(value) if isinstance(value, Path) else value


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{key}={item}" for key, item in value.items() if item)
    if isinstance(value, list):
        return ", ".join(_text(item) for item in value) or "–"
    return "–" if value in (None, "") else str(value)
