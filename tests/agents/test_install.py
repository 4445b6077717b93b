"""Installing agent programs: real pip and tarballs, from a folder; a partial install is never visible."""

import asyncio
import fcntl
import gzip
import io
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from rollyard.agents.installation import AgentInstalls, InstallError
from rollyard.agents.preset import Preset, read_preset

pytestmark = pytest.mark.slow


def wheel(folder: Path, name: str = "tiny", version: str = "1.0", code: str = "") -> None:
    """Writes a wheel with one module."""
    folder.mkdir(exist_ok=True)
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}/__init__.py": "",
        f"{name}/__main__.py": code or "import sys\nprint('tiny', *sys.argv[1:])\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},,\n" for path in files) + f"{info}/RECORD,,\n"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        for path, text in {**files, f"{info}/RECORD": record}.items():
            archive.writestr(path, text)


def pip(version: str = "1.0", more: str = "") -> Preset:
    return read_preset(
        f'name = "tiny"\nversion = "{version}"\ncommand = ["x"]\n[install]\nkind = "pip"\n'
        f'packages = ["tiny=={version}"]\n{more}'
    )


def tarball(path: Path, *members: tuple[str, str, int]) -> None:
    with tarfile.open(path, "w:gz") as archive:
        for name, text, mode in members:
            member = tarfile.TarInfo(name)
            member.mode, member.size = mode, len(text)
            archive.addfile(member, io.BytesIO(text.encode()))


NPM = read_preset('name = "n"\nversion = "2"\ncommand = ["x"]\n[install]\nkind = "npm"\npackages = ["@a/b@2.0.0"]')


@dataclass(frozen=True)
class Installed:
    """The result of `pip()`, which takes a second."""

    installs: AgentInstalls
    wheels: Path
    folder: Path
    messages: list[str]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    base = tmp_path_factory.mktemp("installed")
    wheel(base / "wheels")
    installs, messages = AgentInstalls(base / "agents"), list[str]()
    assert installs.folder_of(pip()) is None
    return Installed(
        installs,
        base / "wheels",
        asyncio.run(installs.install(pip(), messages.append, source=base / "wheels")),
        messages,
    )


async def test_pip_packages_are_in_one_folder_that_all_users_may_read_and_run(installed: Installed):
    folder = installed.folder
    assert installed.installs.folder_of(pip()) == folder and installed.messages == ["pip installs tiny==1.0"]
    assert folder.stat().st_mode & 0o777 == 0o755
    assert all(path.stat().st_mode & 0o444 == 0o444 for path in folder.rglob("*"))
    completed = await asyncio.to_thread(
        subprocess.run, [sys.executable, folder, "tiny", "one", "two"], capture_output=True, text=True, check=False
    )
    assert completed.stdout == "tiny one two\n", completed.stderr
    assert not list(folder.parent.glob(".draft-*"))


async def test_an_existing_install_is_reused_and_another_section_has_another_folder(
    tmp_path: Path, installed: Installed
):
    installs, first = installed.installs, installed.folder
    assert first == await installs.install(pip(), source=tmp_path / "nothing here")
    assert installs.folder_of(pip("2.0")) is None
    less = await installs.install(pip(more='remove = ["tiny/__main__.py"]'), source=installed.wheels)
    assert first != less
    assert (first / "tiny/__main__.py").exists() and not (less / "tiny/__main__.py").exists()


async def test_concurrent_installs_wait_install_once_and_remove_leftovers(
    tmp_path: Path,
):
    wheel(tmp_path / "wheels")
    (tmp_path / "agents/.draft-dead").mkdir(parents=True)
    messages: asyncio.Queue[str] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def notify(text: str) -> None:
        loop.call_soon_threadsafe(messages.put_nowait, text)

    with (tmp_path / "agents/.lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        instances = [AgentInstalls(tmp_path / "agents") for _ in range(2)]
        installs = [asyncio.create_task(it.install(pip(), notify, source=tmp_path / "wheels")) for it in instances]
        assert [await messages.get(), await messages.get()] == ["waiting for another install"] * 2
        assert not any(install.done() for install in installs) and messages.empty()
    folders = await asyncio.gather(*installs)
    assert folders[0] == folders[1] and folders[0].is_dir()
    assert await messages.get() == "pip installs tiny==1.0" and messages.empty()
    assert not list((tmp_path / "agents").glob(".draft-*"))


async def test_a_failed_install_leaves_nothing(tmp_path: Path):
    (tmp_path / "empty").mkdir()
    installs = AgentInstalls(tmp_path / "agents")
    with pytest.raises(InstallError, match=r"pip ended with 1: .*tiny==1.0") as caught:
        await installs.install(pip(), source=tmp_path / "empty")
    assert "--from" in caught.value.remedy
    assert [path.name for path in (tmp_path / "agents").iterdir()] == [".lock"]


async def test_an_npm_package_is_unpacked_below_its_name_with_its_modes(tmp_path: Path):
    tarball(
        tmp_path / "a-b-2.0.0.tgz", ("package/bin/tool", "#!/bin/sh\necho hi\n", 0o755), ("package/README", "x", 0o600)
    )
    folder = await AgentInstalls(tmp_path / "agents").install(NPM, source=tmp_path)
    tool, readme = folder / "@a/b/bin/tool", folder / "@a/b/README"
    assert (tool.stat().st_mode & 0o777, readme.stat().st_mode & 0o777) == (0o755, 0o644)
    assert tool.read_text() == "#!/bin/sh\necho hi\n"


@pytest.mark.parametrize("name", ["package/../../../escaped", "package//{folder}/escaped"])
async def test_a_tarball_that_would_write_elsewhere_is_refused(name: str, tmp_path: Path):
    tarball(tmp_path / "a-b-2.0.0.tgz", (name.format(folder=tmp_path), "x", 0o644))
    installs = AgentInstalls(tmp_path / "agents")
    with pytest.raises(InstallError, match="cannot be unpacked"):
        await installs.install(NPM, source=tmp_path)
    assert installs.folder_of(NPM) is None and not (tmp_path / "escaped").exists()


async def test_links_in_a_tarball_are_not_created(tmp_path: Path):
    """A later file of the same tarball would be written through them."""
    with tarfile.open(tmp_path / "a-b-2.0.0.tgz", "w:gz") as archive:
        for kind, name in ((tarfile.SYMTYPE, "package/out"), (tarfile.LNKTYPE, "package/hard")):
            link = tarfile.TarInfo(name)
            link.type, link.linkname = kind, str(tmp_path)
            archive.addfile(link)
        entry = tarfile.TarInfo("package/out/escaped")
        entry.size = 1
        archive.addfile(entry, io.BytesIO(b"x"))
    folder = await AgentInstalls(tmp_path / "agents").install(NPM, source=tmp_path)
    assert not (tmp_path / "escaped").exists()
    assert [path.name for path in (folder / "@a/b").iterdir()] == ["out"]
    assert (folder / "@a/b/out/escaped").read_text() == "x" and not (folder / "@a/b/out").is_symlink()


@pytest.mark.parametrize("level", [0, 6])
@pytest.mark.parametrize("at", [0.3, 0.5, 0.8])
async def test_a_tarball_with_a_wrong_byte_is_not_installed(tmp_path: Path, at: float, level: int):
    """In stored data only the checksum detects it; in compressed data the decompressor fails."""
    path = tmp_path / "a-b-2.0.0.tgz"
    tarball(path, ("package/tool", "".join(f"line {number}\n" for number in range(20_000)), 0o755))
    raw = bytearray(gzip.compress(gzip.decompress(path.read_bytes()), level))
    raw[int(at * len(raw))] ^= 0xFF
    path.write_bytes(raw)
    installs = AgentInstalls(tmp_path / "agents")
    with pytest.raises(InstallError, match="cannot be unpacked"):
        await installs.install(NPM, source=tmp_path)
    assert installs.folder_of(NPM) is None and not list((tmp_path / "agents").glob(".draft-*"))


async def test_half_a_tarball_is_not_installed(tmp_path: Path):
    path = tmp_path / "a-b-2.0.0.tgz"
    tarball(path, *((f"package/{number}", f"{number}" * 1000, 0o644) for number in range(50)))
    path.write_bytes(path.read_bytes()[:-100])
    installs = AgentInstalls(tmp_path / "agents")
    with pytest.raises(InstallError, match="cannot be unpacked"):
        await installs.install(NPM, source=tmp_path)
    assert installs.folder_of(NPM) is None


async def test_errors_have_a_remedy(tmp_path: Path):
    installs = AgentInstalls(tmp_path / "agents")
    with pytest.raises(InstallError, match=r"a-b-2.0.0.tgz is not in .* npm pack @a/b@2.0.0"):
        await installs.install(NPM, source=tmp_path)
    (tmp_path / "a-b-2.0.0.tgz").write_bytes(b"no archive")
    with pytest.raises(InstallError, match="cannot be unpacked"):
        await installs.install(NPM, source=tmp_path)
    with pytest.raises(InstallError, match="nothing to install"):
        await installs.install(read_preset('name = "a"\ncommand = ["x"]'))
