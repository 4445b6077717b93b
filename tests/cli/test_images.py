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
        said = await cli("images", "pull", f"docker://{reference}")
        assert (said.status, said.out) == (0, ""), said.err
        assert "downloaded" in said.err and "unpacked" in said.err and f"{reference} is stored as folder" in said.err
        (pulled,) = (await cli("images", "pull", reference, "--name", "mine", "--json")).json
    assert (pulled["kinds"], pulled["env"], pulled["size_bytes"]) == (["folder"], {"A": "b"}, 4)
    assert pulled["references"] == sorted([reference, "mine:latest"])
    assert data_dir.stat().st_mode & 0o777 == 0o700

    (listed,) = (await cli("images", "list", "--json")).json
    assert listed["digest"] == pulled["digest"]
    said = await cli("images", "list")
    assert reference in said.out and "mine:latest" in said.out and "4 B" in said.out and "ago" in said.out

    store = ImageStore(data_dir / "images")
    image = store.find("mine")
    assert image is not None
    with store.hold(image):
        said = await cli("images", "remove", image.digest)
        assert said.status == 1 and "is in use" in said.err
        said = await cli("images", "prune", "--max-size", "0")
        assert said.status == 0 and "is in use and is kept" in said.err
    (dry,) = (await cli("images", "prune", "--max-size", "1", "--dry-run", "--json")).json
    assert (dry["freed_bytes"], dry["dry_run"], len(dry["removed"])) == (4, True, 1)
    assert (await cli("images", "prune", "--older-than", "1d", "--json")).json[0]["removed"] == []
    assert (await cli("images", "remove", "mine", reference)).status == 0
    said = await cli("images", "list")
    assert said.out == "" and "there is no image;" in said.err


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
        said = await cli("images", *words)
        assert (said.status, said.out) == (status, ""), said
        assert text in said.err and said.err.count("\n") == 1, said.err
    monkeypatch.setenv("ROLLYARD_RUNTIMES", "local")
    said = await cli("images", "pull", "./empty")
    assert said.status == 1 and "no allowed runtime uses images (local)" in said.err
    (tmp_path / "empty/Dockerfile").write_text("FROM scratch\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    said = await cli("images", "build", "empty", "--as", "folder")
    assert said.status == 1 and "apt-get install podman" in said.err
    (tmp_path / "x.def").write_text("Bootstrap: scratch\n")
    said = await cli("images", "build", "x.def", "--as", "sif")
    assert said.status == 1 and "neither apptainer nor singularity" in said.err


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
    said = await cli("images", "build", recipe, "--json")
    assert said.status == 0, said.err
    (built,) = said.json
    assert built["references"] == ["fix-parser:latest"] and built["workdir"] == "/srv"
    assert built["env"]["GREETING"] == "hello there"
    store = ImageStore(data_dir / "images")
    image = store.find("fix-parser")
    assert image is not None and (store.path(image, "folder") / "made").read_text() == "made\n"
    assert not list(store.root.glob(".building-*"))
    left = await asyncio.to_thread(subprocess.run, ["podman", "images"], capture_output=True, text=True, check=True)
    assert "rollyard-build" not in left.stdout

    (recipe / "Dockerfile").write_text("FROM scratch\nCOPY nothing-of-this-name /\n")
    said = await cli("images", "build", recipe)
    assert said.status == 1 and "nothing-of-this-name" in said.err and "podman build" in said.err


@pytest.mark.skipif(shutil.which("apptainer") is None or not BUSYBOX.exists(), reason="this machine has no Apptainer")
async def test_a_definition_file_is_built_by_apptainer(cli: Cli, tmp_path: Path, data_dir: Path):
    (tmp_path / "tool.def").write_text("Bootstrap: scratch\n%files\n    /bin/busybox /bin/busybox\n")
    said = await cli("images", "build", "tool.def", "--as", "folder", "--as", "sif", "--name", "tool:3", "--json")
    assert said.status == 0, said.err
    assert said.json[0]["kinds"] == ["folder", "sif"]
    store = ImageStore(data_dir / "images")
    image = store.find("tool:3")
    assert image is not None and (store.path(image, "folder") / "bin/busybox").read_bytes() == BUSYBOX.read_bytes()
    (tmp_path / "tool.def").write_text("Bootstrap: nonsense\n")
    said = await cli("images", "build", "tool.def", "--as", "sif")
    assert said.status == 1 and "cannot be built here" in said.err


async def test_shell_uses_the_images_of_the_service(cli: Cli, tmp_path: Path):
    data = {"instruction": "look", "checks": ["true"]}
    wanted = {"environment": "shell", "data": data, "sandbox": {"image": "never-pulled:1"}}
    (tmp_path / "task.json").write_text(json.dumps(wanted))
    said = await cli("shell", "task.json")
    assert said.status == 1 and "not on this machine" in said.err and "rollyard images pull" in said.err


def test_sizes_are_formatted():
    told = {0: "0 B", 999: "999 B", 2048: "2.0 KiB", 3 << 20: "3.0 MiB", 5 << 40: "5.0 TiB"}
    assert {value: size(value) for value in told} == told
