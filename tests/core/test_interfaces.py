"""The interfaces of the packages, in their `base.py`, are documented."""

import ast
from pathlib import Path

import pytest

import rollyard

ROOT = Path(rollyard.__file__).parent


@pytest.mark.parametrize("file", sorted(ROOT.glob("*/base.py")), ids=lambda file: file.parent.name)
def test_every_class_and_method_of_an_interface_has_a_docstring(file: Path):
    missing: list[str] = []
    for kind in ast.parse(file.read_text()).body:
        if isinstance(kind, ast.ClassDef) and not kind.name.startswith("_"):
            methods = [item for item in kind.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)]
            public = [method for method in methods if not method.name.startswith("_")]
            missing += [f"{kind.name}.{item.name}" for item in public if ast.get_docstring(item) is None]
            missing += [kind.name] if ast.get_docstring(kind) is None else []
    assert not missing, f"{file}: {', '.join(missing)}"
