"""What a task's image resolves to for its runtime: paths, names, and forms that do not fit."""

import shutil
from pathlib import Path

import pytest

from rollyard.core.failure import ImageMissing, RuntimeNotAllowed
from rollyard.pipeline.image_resolution import resolve_image
from rollyard.sandbox import ApptainerRuntime, LocalRuntime, OciRuntime
from rollyard.sandbox.images import ImageStore


@pytest.fixture
def apptainer(tmp_path: Path) -> ApptainerRuntime:
    return ApptainerRuntime(root=tmp_path / "apptainer")


@pytest.fixture
def oci(tmp_path: Path) -> OciRuntime:
    return OciRuntime(root=tmp_path / "oci")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    image_root = tmp_path / "allowed" / "root"
    (image_root / "etc").mkdir(parents=True)
    (image_root / "etc/x").write_text("x")
    return image_root


def test_paths_are_folders_and_sif_files_below_the_operators_folders(
    root: Path, apptainer: ApptainerRuntime, oci: OciRuntime, tmp_path: Path
):
    allowed = (root.parent,)
    (root.parent / "a.sif").write_bytes(b"")
    (root.parent / "note.txt").write_text("")
    assert resolve_image(str(root), oci, allowed, None).path == root
    assert resolve_image(str(root.parent / "a.sif"), apptainer, allowed, None).path == root.parent / "a.sif"
    with pytest.raises(ImageMissing, match="is a SIF file, and the runtime oci reads a folder"):
        resolve_image(str(root.parent / "a.sif"), oci, allowed, None)
    for name in ("note.txt", "none", "none.sif"):
        with pytest.raises(ImageMissing, match=r"neither a folder nor a \.sif file"):
            resolve_image(str(root.parent / name), apptainer, allowed, None)
    with pytest.raises(RuntimeNotAllowed, match="the operator's setting `images`"):
        resolve_image(str(tmp_path), apptainer, allowed, None)
    assert resolve_image(str(tmp_path), apptainer, None, None).path == tmp_path, "a person's own shell"
    with pytest.raises(ImageMissing, match="the runtime local has no images"):
        resolve_image(str(root), LocalRuntime(root=tmp_path / "local"), allowed, None)


@pytest.mark.skipif(shutil.which("apptainer") is None, reason="this machine has no Apptainer")
async def test_an_image_in_the_wrong_form_names_the_command_that_fixes_it(
    root: Path, apptainer: ApptainerRuntime, oci: OciRuntime, tmp_path: Path
):
    store = ImageStore(tmp_path / "images")
    with pytest.raises(ImageMissing, match="'mine' is not on this machine"):
        resolve_image("mine", oci, (), store)
    image = await store.pull(str(root), ["sif"], name="mine")
    assert resolve_image("mine", apptainer, (), store).path == store.path(image, "sif")
    with pytest.raises(ImageMissing) as caught:
        resolve_image("mine", oci, (), store)
    assert caught.value.detail == (
        "image 'mine' is here as a SIF file only, and the runtime oci reads a folder; fetch it:"
        " rollyard images pull mine --as folder"
    )
    await store.pull(str(root), ["folder"], name="mine")
    resolved = resolve_image("mine", oci, (), store)
    assert resolved.image is not None and resolved.path == store.path(resolved.image, "folder")
    (store.root / "index.json").write_text("nonsense")
    with pytest.raises(ImageMissing, match=r"index\.json cannot be read"):
        resolve_image("mine", oci, (), store)
