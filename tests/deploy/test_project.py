"""Files about the project: valid by their schemas, and in agreement with the rest of the repository."""

from __future__ import annotations

import json
import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema.validators import validator_for

from rollyard import __version__

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FORMS = sorted(path.name for path in (ROOT / ".github" / "ISSUE_TEMPLATE").iterdir() if path.name != "config.yml")


class Loader(yaml.SafeLoader):
    """YAML in which dates are texts, as in JSON, and `on` is a key of a workflow."""


Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith((":timestamp", ":bool")) or first in "tf"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def read(name: str) -> Any:
    return yaml.load((ROOT / name).read_text(), Loader)


@pytest.mark.parametrize(
    ("schema", "name"),
    [
        ("citation-file-format", "CITATION.cff"),
        ("github-workflows", ".github/workflows/ci.yml"),
        ("github-issue-config", ".github/ISSUE_TEMPLATE/config.yml"),
        *(("github-issue-forms", f".github/ISSUE_TEMPLATE/{name}") for name in FORMS),
    ],
)
def test_files_are_valid_by_their_schemas(schema: str, name: str):
    text = (files("check_jsonschema.builtin_schemas.vendor") / f"{schema}.json").read_text()
    kind = validator_for(json.loads(text))
    kind(json.loads(text)).validate(read(name))
    assert not kind(json.loads(text)).is_valid({**read(name), "no-such-key": 1}) or "forms" in schema


def test_the_version_is_the_same_everywhere():
    assert read("CITATION.cff")["version"] == PROJECT["version"] == __version__
    for path in (ROOT / "deploy" / "kubernetes").rglob("*.yaml"):
        for line in path.read_text().splitlines():
            assert "image: rollyard:" not in line or f"rollyard:{__version__}" in line, f"{path.name}: {line}"


def test_the_workflow_runs_what_developers_run():
    steps = read(".github/workflows/ci.yml")["jobs"]["check"]["steps"]
    assert [step["run"] for step in steps if ".ci/run" in step.get("run", "")] == [".ci/run"]


def test_programs_of_the_commit_hooks_exist():
    (repo,) = read(".pre-commit-config.yaml")["repos"]
    for hook in repo["hooks"]:
        program = hook["entry"].split()[0]
        assert hook["language"] == "system" and (ROOT / program).exists(), hook["id"]


def test_urls_name_one_repository():
    home = PROJECT["urls"]["Homepage"]
    assert all(url.startswith(home) for url in PROJECT["urls"].values())
    assert read("CITATION.cff")["repository-code"] == home
    assert f"repo_url: {home}\n" in (ROOT / "mkdocs.yml").read_text()
