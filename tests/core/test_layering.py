"""The layers of the code: a package imports only from packages of lower layers, and no import is circular."""

import ast
import re
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import rollyard

BELOW: dict[str, set[str]] = {
    "plugins": set(),
    "web": set(),
    "core": set(),
    "exports": {"web", "core"},
    "observe": {"core"},
    "store": {"core"},
    "catalog": {"store", "core"},
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
}
BELOW["service"] = {*BELOW} - {"client", "trainers", "embedded", "exports"}
BELOW["testing"] = {"engines", "tokens", "sandbox", "store", "core"}
BELOW["cli"] = {*BELOW}
EVERYWHERE = {"observe", "plugins"}

ROOT = Path(rollyard.__file__).parent
TEMPLATES = ROOT / "cli" / "project"
"""Files of a user's project, which `rollyard init` writes: they use the public interface."""

CHECKOUT = ROOT.parents[1]
Graph = dict[str, set[str]]


@cache
def modules_of(root: Path) -> dict[str, ast.Module]:
    modules: dict[str, ast.Module] = {}
    for file in root.rglob("*.py"):
        if file.is_relative_to(TEMPLATES):
            continue
        parts = file.relative_to(root.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        modules[name] = ast.parse(file.read_text())
    return modules


@cache
def imports_of(root: Path) -> Graph:
    """Each module's imports of other modules below `root`, in functions and for type checkers too."""
    modules, graph = modules_of(root), Graph()
    for name, tree in modules.items():
        imported: set[str] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    full = f"{node.module}.{alias.name}"
                    imported.add(full if full in modules else node.module)
        graph[name] = (imported & modules.keys()) - {name}
    return graph


def assert_no_cycle(graph: Graph) -> None:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"a circular import: {' → '.join(error.args[1])}")


@pytest.mark.parametrize("package", sorted(BELOW))
def test_a_package_imports_only_from_lower_layers(package: str):
    allowed = BELOW[package] | {package} | (EVERYWHERE if package != "core" else set())
    graph = imports_of(ROOT)
    for name, imported in graph.items():
        if name.split(".")[1:2] != [package]:
            continue
        upward = {other for other in imported if other == "rollyard" or other.split(".")[1] not in allowed}
        assert not upward, f"{name} imports {', '.join(sorted(upward))}"


def test_the_documented_layers_are_those_of_the_code():
    text = (CHECKOUT / "docs" / "architecture.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| [^|]* \|([^|]*)\|$", text, re.MULTILINE))
    assert rows.keys() == BELOW.keys() - {"plugins"}
    for package, cell in rows.items():
        stated = re.sub(r"\(.*?\)", "", cell).strip()
        named = {*rows} if stated == "all below" else {*re.findall(r"\w+", stated)} - {"and", "below"}
        is_whole = stated.endswith("below")
        allowed = BELOW[package] - EVERYWHERE - {"core", package}
        assert named <= rows.keys()
        assert (below(named) if is_whole else named) - EVERYWHERE - {"core", package} == allowed, package


def below(packages: set[str]) -> set[str]:
    """The packages, and all that they import, by way of others too."""
    more = packages.union(*(BELOW[package] for package in packages))
    return packages if more == packages else below(more)


def test_every_package_has_a_layer():
    packages = {name.split(".")[1] for name in modules_of(ROOT) if "." in name}
    assert packages - {"__main__"} == BELOW.keys()


@pytest.mark.parametrize("root", [ROOT, CHECKOUT / "bench"], ids=lambda root: root.name)
def test_no_module_imports_itself_by_way_of_others(root: Path):
    assert_no_cycle({name: others for name, others in imports_of(root).items() if name != root.name})


def test_no_subpackage_imports_itself_by_way_of_others():
    """`engines.weights` may import from `engines.pool`, or the other way round, and not both."""
    folders = {
        name for name in modules_of(ROOT) if name.count(".") == 2 and (ROOT.parent / name.replace(".", "/")).is_dir()
    }
    graph: Graph = {folder: set() for folder in folders}
    for name, imported in imports_of(ROOT).items():
        if (own := ".".join(name.split(".")[:3])) in folders:
            others = {".".join(other.split(".")[:3]) for other in imported}
            graph[own] |= (others & folders) - {own}
    assert_no_cycle(graph)


def test_core_needs_no_other_package():
    for name, tree in modules_of(ROOT).items():
        if not name.startswith("rollyard.core"):
            continue
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for imported in names:
                package = imported.split(".")[0]
                assert package not in {"pydantic", "msgspec", "aiohttp", "numpy", "orjson"}, f"{name}: {imported}"
