"""The plan of the house: a wing imports only from wings below it."""

import ast
from pathlib import Path

import pytest

import rollyard

BELOW: dict[str, set[str]] = {
    "core": set(),
    "observe": {"core"},
    "store": {"core"},
    "http": {"core"},
    "sandbox": {"http", "core"},
    "engines": {"core"},
    "embedded": {"tokens", "core"},
    "tokens": {"core"},
    "tools": {"sandbox", "core"},
    "gateway": {"tokens", "engines", "core"},
    "agents": {"tools", "gateway", "engines", "tokens", "sandbox", "core"},
    "envs": {"tools", "gateway", "engines", "sandbox", "core"},  # gateway: a dialect, to read Gym's rows
    "pipeline": {"envs", "agents", "gateway", "tools", "sandbox", "engines", "tokens", "store", "core"},
    "sampling": {"pipeline", "envs", "store", "core"},
    "fleet": {"pipeline", "engines", "tokens", "store", "core"},
    "client": {"core"},
    "trainers": {"client", "core"},
    "service": {
        "fleet",
        "sampling",
        "pipeline",
        "store",
        "engines",
        "sandbox",
        "http",
        "envs",
        "agents",
        "gateway",
        "tools",
        "tokens",
        "core",
    },
}
ROOT = Path(rollyard.__file__).parent


def imports_of(file: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= names if node.module == "rollyard" else {node.module}
    return {name.split(".")[1] for name in found if name.startswith("rollyard.")}


@pytest.mark.parametrize("wing", sorted(BELOW))
def test_nothing_imports_upward(wing: str):
    allowed = BELOW[wing] | {wing} | ({"observe"} if wing != "core" else set())
    wings = {path.name for path in ROOT.iterdir() if path.is_dir()}
    for file in (ROOT / wing).rglob("*.py"):
        upward = (imports_of(file) & wings) - allowed
        assert not upward, f"{file.relative_to(ROOT)} imports from {', '.join(sorted(upward))}"


def test_the_core_needs_no_package_at_all():
    for file in (ROOT / "core").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                assert name.split(".")[0] not in {"pydantic", "msgspec", "aiohttp", "numpy", "orjson"}, (
                    f"{file}: {name}"
                )
