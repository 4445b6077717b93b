"""`rollyard images` with a real registry, real Apptainer and real podman."""

import asyncio
import json
import shutil
import subprocess
from pathlib import Path

import pytest

from rollyard.cli._progress import size
from rollyard.sandbox.images import ImageStore
from tests.cli.conftest import Cli
from tests.sandbox.registry import BUSYBOX, Registry, file, folder, pack, tar

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def data_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ROLLYARD_DATA_DIR", str(tmp_path / "data"))
    return tmp_path / "data"


async def test_pull_list_prune_and_remove(cli: Cli, data_dir: Path):
    async with Registry() as registry:
        reference = registry.put("org/name:v1", pack(tar(folder("etc"), file("etc/x", "1234")), env=["A=b"]))
        result = await cli("images", "pull", f"docker://{reference}")
        assert (result.status, result.out) == (0, ""), result.err
        assert (
            "downloaded" in result.err and "unpacked" in result.err and f"{reference} is stored as folder" in result.err
        )
        (pulled,) = (await cli("images", "pull", reference, "--name", "mine", "--json")).json
    assert (pulled["kinds"], pulled["env"], pulled["size_bytes"]) == (["folder"], {"A": "b"}, 4)
    assert pulled["references"] == sorted([reference, "mine:latest"])
    assert data_dir.stat().st_mode & 0o777 == 0o700

    (listed,) = (await cli("images", "list", "--json")).json
    assert listed["digest"] == pulled["digest"]
    result = await cli("images", "list")
    assert reference in result.out and "mine:latest" in result.out and "4 B" in result.out and "ago" in result.out

    store = ImageStore(data_dir / "images")
    image = store.find("mine")
    assert image is not None
    with store.hold(image):
        result = await cli("images", "remove", image.digest)
        assert result.status == 1 and "is in use" in result.err
        result = await cli("images", "prune", "--max-size", "0")
        assert result.status == 0 and "is in use and is kept" in result.err
    (dry,) = (await cli("images", "prune", "--max-size", "1", "--dry-run", "--json")).json
    assert (dry["freed_bytes"], dry["dry_run"], len(dry["removed"])) == (4, True, 1)
    assert (await cli("images", "prune", "--older-than", "1d", "--json")).json[0]["removed"] == []
    assert (await cli("images", "remove", "mine", reference)).status == 0
    result = await cli("images", "list")
    assert result.out == "" and "there is no image;" in result.err


async def test_errors_are_one_line_with_a_remedy(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "empty").mkdir()
    for words, status, text in (
        (("pull", "UPPER"), 1, "not the name of an image"),
        (("pull", "./none"), 1, "there is no none"),
        (("pull", "x", "--as", "ext3"), 2, "expected folder or sif"),
        (("prune", "--older-than", "soon"), 2, "expected a number with a unit"),
        (("prune", "--max-size", "5x"), 2, "expected a number with a unit"),
        (("remove", "none"), 1, "rollyard images list"),
        (("build", "none.def"), 1, "there is no"),
        (("build", "empty"), 1, "has no Dockerfile or Containerfile"),
    ):
        result = await cli("images", *words)
        assert (result.status, result.out) == (status, ""), result
        assert text in result.err and result.err.count("\n") == 1, result.err
    monkeypatch.setenv("ROLLYARD_RUNTIMES", "local")
    result = await cli("images", "pull", "./empty")
    assert result.status == 1 and "no allowed runtime uses images (local)" in result.err
    (tmp_path / "empty/Dockerfile").write_text("FROM scratch\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    result = await cli("images", "build", "empty", "--as", "folder")
    assert result.status == 1 and "apt-get install podman" in result.err
    (tmp_path / "x.def").write_text("Bootstrap: scratch\n")
    result = await cli("images", "build", "x.def", "--as", "sif")
    assert result.status == 1 and "neither apptainer nor singularity" in result.err


def podman_works() -> bool:
    program = shutil.which("podman")
    return program is not None and subprocess.run([program, "info"], capture_output=True, check=False).returncode == 0


@pytest.mark.xdist_group("podman")
async def test_a_dockerfile_is_built_by_an_available_engine(
    cli: Cli, tmp_path: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch
):
    if not podman_works() or not BUSYBOX.exists():
        pytest.skip("podman does not work on this machine")
    storage = tmp_path / "storage.conf"  # its own store, so that nothing is left in the machine's
    lines = ('driver = "vfs"', f'graphroot = "{tmp_path}/graph"', f'runroot = "{tmp_path}/run"')
    storage.write_text("[storage]\n" + "\n".join(lines) + "\n")
    monkeypatch.setenv("CONTAINERS_STORAGE_CONF", str(storage))
    recipe = tmp_path / "Fix-Parser"
    recipe.mkdir()
    shutil.copy(BUSYBOX, recipe / "busybox")
    (recipe / "Dockerfile").write_text(
        'FROM scratch\nCOPY busybox /bin/busybox\nENV GREETING="hello there"\nWORKDIR /srv\n'
        'RUN ["/bin/busybox", "sh", "-c", "echo made > /made"]\n'
    )
    result = await cli("images", "build", recipe, "--json")
    assert result.status == 0, result.err
    (built,) = result.json
    assert built["references"] == ["fix-parser:latest"] and built["workdir"] == "/srv"
    assert built["env"]["GREETING"] == "hello there"
    store = ImageStore(data_dir / "images")
    image = store.find("fix-parser")
    assert image is not None and (store.path(image, "folder") / "made").read_text() == "made\n"
    assert not list(store.root.glob(".building-*"))
    podman_images = await asyncio.to_thread(
        subprocess.run, ["podman", "images"], capture_output=True, text=True, check=True
    )
    assert "rollyard-build" not in podman_images.stdout

    (recipe / "Dockerfile").write_text("FROM scratch\nCOPY nothing-of-this-name /\n")
    result = await cli("images", "build", recipe)
    assert result.status == 1 and "nothing-of-this-name" in result.err and "podman build" in result.err


@pytest.mark.skipif(shutil.which("apptainer") is None or not BUSYBOX.exists(), reason="this machine has no Apptainer")
async def test_a_definition_file_is_built_by_apptainer(cli: Cli, tmp_path: Path, data_dir: Path):
    (tmp_path / "tool.def").write_text("Bootstrap: scratch\n%files\n    /bin/busybox /bin/busybox\n")
    result = await cli("images", "build", "tool.def", "--as", "folder", "--as", "sif", "--name", "tool:3", "--json")
    assert result.status == 0, result.err
    assert result.json[0]["kinds"] == ["folder", "sif"]
    store = ImageStore(data_dir / "images")
    image = store.find("tool:3")
    assert image is not None and (store.path(image, "folder") / "bin/busybox").read_bytes() == BUSYBOX.read_bytes()
    (tmp_path / "tool.def").write_text("Bootstrap: nonsense\n")
    result = await cli("images", "build", "tool.def", "--as", "sif")
    assert result.status == 1 and "cannot be built here" in result.err


async def test_shell_uses_the_images_of_the_service(cli: Cli, tmp_path: Path):
    data = {"instruction": "look", "checks": ["true"]}
    task = {"environment": "shell", "data": data, "sandbox": {"image": "never-pulled:1"}}
    (tmp_path / "task.json").write_text(json.dumps(task))
    result = await cli("shell", "task.json")
    assert result.status == 1 and "not on this machine" in result.err and "rollyard images pull" in result.err


def test_sizes_are_formatted():
    expected = {0: "0 B", 999: "999 B", 2048: "2.0 KiB", 3 << 20: "3.0 MiB", 5 << 40: "5.0 TiB"}
    assert {value: size(value) for value in expected} == expected
