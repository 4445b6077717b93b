"""The image store with a real registry on loopback, archives, Apptainer, other processes, and kill -9."""

import asyncio
import base64
import json
import os
import shutil
import signal
import socket
import sys
import tarfile
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from yarl import URL

from rollyard.core.failure import ImageMissing
from rollyard.sandbox.images import (
    HostileImage,
    ImageError,
    ImageInUse,
    ImageStore,
    PullStep,
    RetrySettings,
    UnpackBounds,
    parse_reference,
)
from rollyard.sandbox.images.oci import machine
from rollyard.sandbox.images.registry import Registry as RegistryClient
from tests.sandbox.registry import BUSYBOX, Registry, busybox, file, folder, index_of, pack, sha256, tar, write_layout

needs_apptainer = pytest.mark.skipif(
    shutil.which("apptainer") is None or not BUSYBOX.exists(), reason="this machine has no Apptainer or busybox"
)
QUICK = RetrySettings(tries=3, wait_s=0.01, connect_s=5, silence_s=10)


@pytest.fixture
async def registry() -> AsyncGenerator[Registry, None]:
    async with Registry() as server:
        yield server


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    return ImageStore(tmp_path / "images", patience=QUICK)


@pytest.fixture(autouse=True)
def without_registry_login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("REGISTRY_AUTH_FILE", "DOCKER_CONFIG", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def small(text: str = "hello") -> bytes:
    return tar(folder("etc"), file("etc/hello", text))


def leftovers(store: ImageStore) -> list[Path]:
    return [*store.root.glob("*/.partial"), *store.root.glob(".building-*")]


# --- from a registry ---


async def test_an_image_is_pulled_by_tag_and_found_by_all_its_names(registry: Registry, store: ImageStore):
    image = pack(small(), tar(file("etc/.wh.hello"), file("etc/new")), env=["A=b=c", "PATH=/x"], workdir="/srv")
    other = pack(small("another machine's"), architecture="pdp11")
    index = index_of((other, "pdp11"), (image, machine()))
    reference = registry.put("org/name:v1", image, index)
    steps: list[PullStep] = []
    pulled = await store.pull(f"docker://{reference}", on_progress=steps.append)
    assert (pulled.digest, pulled.kinds, pulled.references) == (image.digest, ("folder",), (reference,))
    assert (pulled.env, pulled.workdir, pulled.user) == ({"A": "b=c", "PATH": "/x"}, "/srv", "nobody")
    assert [path.name for path in (store.path(pulled, "folder") / "etc").iterdir()] == ["new"]
    names = (reference, f"docker://{reference}", image.digest, f"{registry.url}/org/name@{image.digest}")
    for name in (*names, f"{registry.url}/org/name:any@{sha256(index)}"):
        stored = store.find(name)
        assert stored is not None and stored.digest == image.digest, name
    assert store.find(f"{registry.url}/org/name:v2") is None
    assert store.find("no/such: name") is None
    assert {step.item for step in steps if step.phase == "download"} == {sha256(layer) for layer in image.layers}
    assert steps[-1].done_bytes == steps[-1].total_bytes
    assert not leftovers(store)

    registry.log.clear()
    assert (await store.pull(reference)).digest == image.digest
    assert not registry.asked("blob") or all(sha256(layer) not in str(registry.log) for layer in image.layers)


async def test_an_image_may_contain_a_layer_twice(registry: Registry, store: ImageStore):
    layer = small()
    image = pack(layer, tar(file("etc/.wh.hello")), layer)
    pulled = await store.pull(registry.put("name:1", image))
    assert (store.path(pulled, "folder") / "etc/hello").exists()
    assert len(registry.asked(sha256(image.layers[0]))) == 1


async def test_a_tag_that_moved_is_pulled_again(registry: Registry, store: ImageStore):
    first, second = pack(small("1")), pack(small("2"))
    reference = registry.put("name:latest", first)
    await store.pull(reference)
    registry.put("name:latest", second)
    await store.pull(reference)
    stored = store.find(reference)
    assert stored is not None and stored.digest == second.digest
    assert store.find(first.digest) is not None, "a pinned digest is still found"


async def test_a_login_is_sent_to_a_registry_that_requires_a_token(
    registry: Registry, store: ImageStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    registry.login = ("me", "my:password")
    reference = registry.put("private/name:1", pack(small()))
    with pytest.raises(ImageError, match="log in first"):
        await store.pull(reference)
    auth = base64.b64encode(b"me:my:password").decode()
    (tmp_path / "home/.docker").mkdir(parents=True)
    (tmp_path / "home/.docker/config.json").write_text(json.dumps({"auths": {registry.url: {"auth": auth}}}))
    await store.pull(reference)
    assert registry.asked("token") and "token repository:private/name:pull" in registry.log
    (tmp_path / "broken.json").write_text("{")
    monkeypatch.setenv("REGISTRY_AUTH_FILE", str(tmp_path / "broken.json"))
    with pytest.raises(ImageError, match=r"broken\.json cannot be read"):
        await store.pull(reference)


async def test_an_interrupted_download_resumes(registry: Registry, store: ImageStore):
    image = pack(tar(file("noise", os.urandom(300_000))))
    reference = registry.put("name:1", image)
    registry.breaks = [len(image.config), 100_000, 0, 100_000]  # the whole config; one try receives no byte
    await store.pull(reference)
    first, *later = registry.asked(sha256(image.layers[0]))
    assert "bytes=" not in first and len(later) == 3 and all("bytes=" in line for line in later), later


async def test_without_range_support_a_download_restarts(registry: Registry, store: ImageStore):
    noise = os.urandom(200_000)
    image = pack(tar(file("noise", noise)))
    reference = registry.put("name:1", image)
    registry.ignores_range = True
    registry.breaks = [len(image.config), 50_000]  # the whole config, then part of the layer
    pulled = await store.pull(reference)
    assert (store.path(pulled, "folder") / "noise").read_bytes() == noise


async def test_corrupt_content_is_refused_and_not_stored(registry: Registry, store: ImageStore):
    image = pack(tar(file("noise", os.urandom(50_000))))
    reference = registry.put("name:1", image)
    digest = sha256(image.layers[0])
    registry.blobs[digest] = bytes(len(image.layers[0]))
    with pytest.raises(ImageError, match="its sha256 differs"):
        await store.pull(reference)
    registry.blobs[digest] = image.layers[0][:-10]
    with pytest.raises(ImageError, match="it ended at"):
        await store.pull(reference)
    registry.blobs[digest] = image.layers[0] + b"more"
    with pytest.raises(HostileImage, match="longer than"):
        await store.pull(reference)
    registry.manifests[image.digest] = image.manifest + b" "
    with pytest.raises(ImageError, match="the registry answered"):
        await store.pull(f"{registry.url}/name@{image.digest}")
    assert store.find(reference) is None and store.list() == []
    assert store.prune().leftovers == 1 and not list(store.root.glob("sha256-*"))


async def test_errors_describe_the_cause(registry: Registry, store: ImageStore, tmp_path: Path):
    foreign = registry.put("foreign:1", pack(small(), architecture="pdp11"))
    listed = registry.put("listed:1", pack(small()), index_of((pack(small()), "pdp11")))
    registry.manifests["nonsense:1"] = b"<html>"
    registry.manifests["old:1"] = b'{"schemaVersion": 1}'
    registry.manifests["sha512:1"] = json.dumps(
        {"schemaVersion": 2, "config": {"digest": "sha512:" + "0" * 128, "size": 1}, "layers": []}
    ).encode()
    for source, words in {
        foreign: "made for linux/pdp11",
        listed: "not made for linux/",
        f"{registry.url}/nonsense:1": "not JSON",
        f"{registry.url}/old:1": "an unsupported format",
        f"{registry.url}/sha512:1": "not a supported digest",
        f"{registry.url}/nowhere:1": "there is no .*nowhere:1",
        "UPPER:1": "not the name of an image",
        "name@sha256:12": "is not a digest",
        f"oci:{tmp_path}/none": "there is no",
        "./none.sif": "there is no",
        "127.0.0.1:1/name": "did not return",
    }.items():
        with pytest.raises(ImageError, match=words):
            await store.pull(source)
    assert store.list() == []


async def test_no_login_is_sent_to_a_redirected_blob_host(registry: Registry, store: ImageStore, tmp_path: Path):
    auth = base64.b64encode(b"me:secret").decode()
    (tmp_path / "home/.docker").mkdir(parents=True)
    (tmp_path / "home/.docker/config.json").write_text(json.dumps({"auths": {registry.url: {"auth": auth}}}))
    async with Registry() as elsewhere:
        registry.login = ("me", "secret")
        image = pack(small())
        reference = registry.put("name:1", image)
        elsewhere.put("name:1", image)
        registry.redirect = f"http://{registry.url}/v2/name/blobs/"
        with pytest.raises(ImageError, match="redirects too often"):
            await store.pull(reference)
        registry.redirect = f"http://{elsewhere.url}/v2/name/blobs/"
        await store.pull(reference)
        assert len(elsewhere.asked("blob")) == 2 and not elsewhere.asked("with authorization")
        assert registry.asked("with authorization")


async def test_a_redirected_blob_host_cannot_request_the_login(registry: Registry, store: ImageStore, tmp_path: Path):
    auth = base64.b64encode(b"me:secret").decode()
    (tmp_path / "home/.docker").mkdir(parents=True)
    (tmp_path / "home/.docker/config.json").write_text(json.dumps({"auths": {registry.url: {"auth": auth}}}))
    async with Registry() as elsewhere:
        reference = registry.put("name:1", pack(small()))
        elsewhere.login = ("me", "secret")
        registry.redirect = f"http://{elsewhere.url}/v2/name/blobs/"
        with pytest.raises(ImageError, match="denies access to"):
            await store.pull(reference)
        assert elsewhere.asked("blob") and not elsewhere.asked("token")


def test_redirects_from_https_to_http_are_refused():
    registry = RegistryClient(parse_reference("images.example/name"))
    assert str(registry._private("/y", URL("https://blobs.example/x"))) == "https://blobs.example/y"
    for url in ("http://blobs.example/x", "ftp://blobs.example/x", "file:///etc/passwd", "http://[", "x", ""):
        with pytest.raises(ImageError, match="which is not HTTPS"):
            registry._private(url)


async def test_an_image_above_the_limit_is_not_downloaded(registry: Registry, tmp_path: Path):
    store = ImageStore(tmp_path / "images", bounds=UnpackBounds(total_bytes=1000), patience=QUICK)
    image = pack(tar(file("noise", os.urandom(5000))))
    with pytest.raises(HostileImage, match="its layers have"):
        await store.pull(registry.put("name:1", image))
    assert not registry.asked(sha256(image.layers[0]))


# --- from files ---


async def test_layouts_and_archives_are_pulled(store: ImageStore, tmp_path: Path):
    image = pack(small(), env=["A=1"])
    write_layout(tmp_path / "layout", image)
    by_layout = await store.pull(f"oci:{tmp_path}/layout")
    assert (by_layout.digest, by_layout.references) == (image.digest, ("layout:latest",))
    assert (await store.pull(f"oci:{tmp_path}/layout:v1", name="mine:2")).references == ("layout:latest", "mine:2")
    with pytest.raises(ImageError, match="no tag 'v2'"):
        await store.pull(f"oci:{tmp_path}/layout:v2")
    with tarfile.open(tmp_path / "layout.tar", "w") as archive:
        archive.add(tmp_path / "layout", ".")
    assert (await store.pull(f"oci-archive:{tmp_path}/layout.tar")).digest == image.digest

    saved = tmp_path / "saved"
    (saved / "one").mkdir(parents=True)
    (saved / "config.json").write_bytes(image.config)
    (saved / "one/layer.tar").write_bytes(small())
    manifest = [{"Config": "config.json", "RepoTags": ["name:v7"], "Layers": ["one/layer.tar"]}]
    (saved / "manifest.json").write_text(json.dumps(manifest))
    with tarfile.open(tmp_path / "saved.tar", "w") as archive:
        archive.add(saved, "")
    by_docker = await store.pull(f"docker-archive:{tmp_path}/saved.tar:v7")
    assert by_docker.env == {"A": "1"} and by_docker.references == ("saved:v7",)
    assert (store.path(by_docker, "folder") / "etc/hello").read_text() == "hello"

    (saved / "one/layer.tar").write_bytes(small("other"))
    with tarfile.open(tmp_path / "changed.tar", "w") as archive:
        archive.add(saved, "")
    fresh = ImageStore(tmp_path / "fresh")
    with pytest.raises(ImageError, match="does not match its manifest"):
        await fresh.pull(f"docker-archive:{tmp_path}/changed.tar")
    (tmp_path / "layout/blobs/sha256" / sha256(image.layers[0])[7:]).write_bytes(b"x")
    with pytest.raises(ImageError, match="missing or broken"):
        await fresh.pull(f"oci:{tmp_path}/layout")


async def test_an_invalid_archive_is_an_error(store: ImageStore, tmp_path: Path):
    bad = {"manifest.json": '[{"Config": 1}]', "index.json": "[]", "other": "x"}
    for name, text in bad.items():
        (tmp_path / name).write_text(text)
        with tarfile.open(tmp_path / f"{name}.tar", "w") as archive:
            archive.add(tmp_path / name, name)
        with pytest.raises(ImageError):
            await store.pull(f"docker-archive:{tmp_path}/{name}.tar")
    with pytest.raises(ImageError, match="not a tar archive"):
        await store.pull(f"oci-archive:{tmp_path}/other")
    with pytest.raises(ImageError, match="not an OCI image layout"):
        await store.pull(f"oci:{tmp_path.parent}")


async def test_a_folder_is_copied_without_dangerous_entries(store: ImageStore, tmp_path: Path):
    source = tmp_path / "My Root"
    (source / "bin").mkdir(parents=True)
    (source / "bin/tool").write_text("x")
    (source / "bin/tool").chmod(0o4755)
    (source / "link").symlink_to("/etc")
    os.mkfifo(source / "fifo")
    image = await store.pull(str(source))
    root = store.path(image, "folder")
    assert image.references == ("my-root:latest",) and image.skipped == 1
    assert (root / "bin/tool").stat().st_mode & 0o7777 == 0o755
    assert (root / "link").readlink() == Path("/etc") and not (root / "fifo").exists()
    assert (await store.pull(str(source))).digest == image.digest, "the same content is the same image"
    (source / "bin/tool").write_text("y")
    assert (await store.pull(str(source))).digest != image.digest


@needs_apptainer
async def test_sif_files_are_built_copied_and_unpacked(registry: Registry, store: ImageStore, tmp_path: Path):
    reference = registry.put("busy:1", pack(tar(*busybox())))
    image = await store.pull(reference, ["sif"])
    assert image.kinds == ("sif",), "the folder was only an intermediate step"
    sif = store.path(image, "sif")
    with pytest.raises(ImageMissing, match="stored as sif, not as folder"):
        store.path(image, "folder")
    text = await output("apptainer", "exec", "--userns", str(sif), "/bin/sh", "-c", "echo from-inside")
    assert "from-inside" in text

    assert (await store.pull(reference, ["folder"])).kinds == ("folder", "sif")

    copy = tmp_path / "Copy.sif"
    shutil.copy(sif, copy)
    taken = await store.pull(str(copy), ["sif", "folder"])
    assert taken.references == ("copy:latest",) and taken.kinds == ("folder", "sif")
    assert store.path(taken, "sif").read_bytes() == sif.read_bytes()
    root = store.path(taken, "folder")
    assert (root / "bin/busybox").read_bytes() == BUSYBOX.read_bytes()
    assert {path.lstat().st_uid for path in root.rglob("*")} == {os.geteuid()}
    assert not leftovers(store)
    (tmp_path / "fake.sif").write_text("no SIF")
    with pytest.raises(ImageError, match="not a SIF file"):
        await store.pull(str(tmp_path / "fake.sif"), ["sif"])


async def test_without_apptainer_a_sif_is_refused_before_the_download(
    registry: Registry, store: ImageStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ImageError, match="neither apptainer nor singularity"):
        await store.pull(registry.put("name:1", pack(small())), ["sif"])
    assert not registry.log


# --- concurrent and killed pulls ---

PULL = """
import asyncio, sys
from pathlib import Path
from rollyard.sandbox.images import ImageStore
report = lambda step: print(step.phase, step.item, flush=True)
print("pulled", asyncio.run(ImageStore(Path(sys.argv[1])).pull(sys.argv[2], on_progress=report)).digest, flush=True)
"""


async def puller(store: ImageStore, reference: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-c", PULL, str(store.root), reference, stdout=asyncio.subprocess.PIPE
    )


async def output(*argv: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *argv, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    stdout, _ = await process.communicate()
    return stdout.decode()


async def test_of_two_processes_one_pulls_and_the_other_reports_that_it_waits(registry: Registry, store: ImageStore):
    image = pack(tar(file("noise", os.urandom(100_000))))
    reference = registry.put("name:1", image)
    registry.blob_gate = asyncio.Event()
    first = await puller(store, reference)
    await asyncio.wait_for(registry.reached.wait(), 90)  # the config, then the layer
    registry.reached.clear()
    registry.blob_gate.set()
    registry.blob_gate = asyncio.Event()
    await asyncio.wait_for(registry.reached.wait(), 90)
    layer_hold, registry.blob_gate = registry.blob_gate, None
    second = await puller(store, reference)
    assert second.stdout is not None and first.stdout is not None
    line = await asyncio.wait_for(second.stdout.readline(), 90)
    assert line.decode().startswith(f"waiting pid {first.pid} on {socket.gethostname()} is making this image")
    assert store.find(reference) is None
    layer_hold.set()
    outputs = [(await asyncio.wait_for(process.communicate(), 90))[0].decode() for process in (first, second)]
    assert all(f"pulled {image.digest}" in text for text in outputs), outputs
    assert len(registry.asked(sha256(image.layers[0]))) == 1
    assert "download" not in outputs[1]


async def test_after_kill_9_the_next_pull_resumes_the_download(registry: Registry, store: ImageStore):
    noise = os.urandom(400_000)
    image = pack(tar(file("noise", noise)))
    reference = registry.put("name:1", image)
    registry.blob_gate = asyncio.Event()
    process = await puller(store, reference)
    await asyncio.wait_for(registry.reached.wait(), 90)
    registry.reached.clear()
    registry.blob_gate.set()
    registry.blob_gate = asyncio.Event()
    await asyncio.wait_for(registry.reached.wait(), 90)
    part = next(iter(store.root.glob("*/.partial/blobs/*.part")), None)
    async with asyncio.timeout(90):
        while part is None or part.stat().st_size == 0:  # until the half that was sent is on disk
            await asyncio.sleep(0.01)
            part = next(iter(store.root.glob("*/.partial/blobs/*.part")), None)
    process.send_signal(signal.SIGKILL)
    await process.communicate()
    registry.blob_gate.set()
    registry.blob_gate = None
    assert store.find(reference) is None and leftovers(store)
    (part.parent.parent / "folder/junk").write_text("junk")  # as if it had been killed while unpacking

    registry.log.clear()
    pulled = await store.pull(reference)
    assert [path.name for path in store.path(pulled, "folder").iterdir()] == ["noise"]
    assert (store.path(pulled, "folder") / "noise").read_bytes() == noise
    (asked,) = registry.asked(sha256(image.layers[0]))
    assert "bytes=" in asked, "the download was resumed"
    assert not leftovers(store)


async def test_a_layer_corrupted_by_a_crash_is_fetched_again(registry: Registry, store: ImageStore):
    image = pack(tar(file("noise", b"right")))
    reference = registry.put("name:1", image)
    blobs = store.root / image.digest.replace(":", "-") / ".partial/blobs"
    blobs.mkdir(parents=True)
    (blobs / sha256(image.layers[0]).removeprefix("sha256:")).write_bytes(tar(file("noise", b"wrong")))
    pulled = await store.pull(reference)
    assert (store.path(pulled, "folder") / "noise").read_bytes() == b"right"


async def test_a_cancelled_pull_releases_its_lock(registry: Registry, store: ImageStore):
    image = pack(tar(file("noise", os.urandom(100_000))))
    reference = registry.put("name:1", image)
    registry.blob_gate = asyncio.Event()
    pulling = asyncio.create_task(store.pull(reference))
    await asyncio.wait_for(registry.reached.wait(), 90)
    pulling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pulling
    registry.blob_gate.set()
    registry.blob_gate = None
    assert (await store.pull(reference)).digest == image.digest


# --- using and removing ---


async def test_an_image_in_use_is_not_removed(registry: Registry, store: ImageStore):
    image = await store.pull(registry.put("name:1", pack(small())))
    other = ImageStore(store.root)
    with store.hold(image):
        with pytest.raises(ImageInUse):
            other.remove(image.reference)
        pruned = other.prune(older_than_s=-1.0)
        assert (pruned.images, [one.digest for one in pruned.in_use]) == ((), [image.digest])
        assert (store.path(image, "folder") / "etc/hello").exists()
    assert [one.digest for one in other.prune(older_than_s=-1.0, is_dry_run=True).images] == [image.digest]
    assert store.find(image.reference) is not None, "a dry run removes nothing"
    other.remove(image.reference)
    assert store.find(image.reference) is None and not list(store.root.glob("sha256-*"))
    with pytest.raises(ImageMissing, match="was removed"), store.hold(image):
        pass
    with pytest.raises(ImageMissing):
        store.remove(image.reference)


async def test_prune_removes_the_longest_unused_until_the_rest_fits(registry: Registry, store: ImageStore):
    images = [
        await store.pull(registry.put(f"name{number}:1", pack(tar(file("noise", os.urandom(10_000))))))
        for number in range(3)
    ]
    for age, image in zip((100, 300, 200), images, strict=True):
        lock = store.root / "locks" / f"{image.digest[7:]}.use"
        then = lock.stat().st_mtime - age
        os.utime(lock, (then, then))
    with store.hold(images[2]):
        pass  # updates its time of use
    pruned = store.prune(max_bytes=25_000)
    assert [image.reference for image in pruned.images] == [images[1].reference]
    assert pruned.freed_bytes == 10_000
    pruned = store.prune(older_than_s=50)
    assert [image.reference for image in pruned.images] == [images[0].reference]
    assert [image.reference for image in store.list()] == [images[2].reference]


async def test_an_image_is_removed_with_its_last_name(registry: Registry, store: ImageStore, tmp_path: Path):
    image = pack(small())
    one, two = registry.put("one:1", image), registry.put("two:1", image)
    await store.pull(one)
    await store.pull(two)
    assert (await store.pull(two, name="own")).references == tuple(sorted((one, two, "own:latest")))
    store.remove("own")
    store.remove(one)
    assert store.find(one) is None and store.find(two) is not None
    store.remove(two)
    assert store.list() == []


async def test_a_corrupt_index_is_reported_and_not_overwritten(registry: Registry, store: ImageStore):
    reference = registry.put("name:1", pack(small()))
    await store.pull(reference)
    (store.root / "index.json").write_text("{")
    with pytest.raises(ImageError, match=r"index\.json cannot be read"):
        store.find(reference)
    with pytest.raises(ImageError, match=r"index\.json cannot be read"):
        await store.pull(reference)
    assert (store.root / "index.json").read_text() == "{"
