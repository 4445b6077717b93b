"""Builds images from recipes: an Apptainer definition file, or a Dockerfile with the first container engine that works.

The engine builds in its own store under a name that only this build uses, saves an archive, and removes the name. The
archive is then pulled like any other.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from rollyard.sandbox.base import ImageKind
from rollyard.sandbox.images.errors import ImageError
from rollyard.sandbox.images.image import Image
from rollyard.sandbox.images.index import building_folder
from rollyard.sandbox.images.programs import ProgramFailed, apptainer, run_program
from rollyard.sandbox.images.reference import own_name
from rollyard.sandbox.images.sources import OnProgress, PullStep
from rollyard.sandbox.images.store import ImageStore

ENGINES = ("podman", "docker", "buildah")
RECIPES = ("Dockerfile", "Containerfile")


async def build_image(
    store: ImageStore,
    recipe: Path,
    kinds: Sequence[ImageKind],
    *,
    name: str | None = None,
    context: Path | None = None,
    on_progress: OnProgress = lambda _: None,
) -> Image:
    """Builds an image and adds it to the store. `recipe` is a .def file, a Dockerfile, or a folder with one."""
    recipe, default_name = _locate_recipe(recipe)
    name = own_name(name or default_name)
    with building_folder(store.root) as (work, lock):
        if recipe.suffix == ".def":
            await _by_apptainer(recipe, work, lock, on_progress)
            source = str(work / "image.sif")
        else:
            await _by_engine(recipe, context, work, on_progress)
            source = f"oci-archive:{work / 'image.tar'}"
        return await store.pull(source, kinds, name=name, on_progress=on_progress)


def _locate_recipe(recipe: Path) -> tuple[Path, str]:
    """Returns the recipe's absolute path and the default name of its image: for a Dockerfile, its folder's name."""
    recipe = recipe.expanduser().resolve()
    if not recipe.exists():
        raise ImageError(f"there is no {recipe}")
    default_name = recipe.stem if recipe.suffix == ".def" else recipe.name if recipe.is_dir() else recipe.parent.name
    return recipe, default_name.lower()


async def _by_apptainer(recipe: Path, work: Path, lock: int, report: OnProgress) -> None:
    """Builds with Apptainer. Root builds directly, then, if the kernel forbids that, in a user namespace. Other users
    build with fakeroot, then without."""
    program = apptainer()
    env = {f"{tool}_TMPDIR": str(work) for tool in ("APPTAINER", "SINGULARITY")}
    ways: list[list[str]] = [[], ["--userns"]] if os.geteuid() == 0 else [["--fakeroot"], []]
    for last, way in enumerate(ways, 1 - len(ways)):
        argv = [program, "build", "--force", *way, str(work / "image.sif"), str(recipe)]
        try:
            report_line = lambda line: report(PullStep("note", line))  # noqa: E731
            await run_program(argv, env=env, cwd=recipe.parent, keeping=(lock,), on_line=report_line)
            return
        except ProgramFailed as error:
            if last == 0:
                raise ImageError(
                    f"{recipe} cannot be built here: {error.tail}",
                    "fakeroot needs a line for this user in /etc/subuid and /etc/subgid (usermod --add-subuids"
                    " 100000-165535 --add-subgids 100000-165535 USER); or build it elsewhere and pull the .sif file",
                ) from error
            report(PullStep("note", f"`{' '.join(argv[:3])}` failed; trying another way"))


async def _by_engine(recipe: Path, context: Path | None, work: Path, report: OnProgress) -> None:
    file = _recipe_file(recipe)
    context = context or file.parent
    engine = await _engine()
    tag = f"localhost/rollyard-build-{uuid4().hex}:latest"
    words = ["--file", str(file), "--tag", tag, str(context.resolve())]
    report_line = lambda line: report(PullStep("note", line))  # noqa: E731
    kind = Path(engine).name
    try:
        try:
            await run_program([engine, "build", *words], on_line=report_line)
        except ProgramFailed as error:
            if kind == "docker" or not _lacks_container(error.tail):
                raise
            report_line(f"{kind} cannot start containers here; building with --isolation chroot")
            await run_program([engine, "build", "--isolation", "chroot", *words], on_line=report_line)
        save = {
            "podman": ["save", "--format", "oci-archive", "--output", str(work / "image.tar"), tag],
            "docker": ["save", "--output", str(work / "image.tar"), tag],
            "buildah": ["push", tag, f"oci-archive:{work / 'image.tar'}"],
        }
        await run_program([engine, *save[kind]], on_line=report_line)
    except ProgramFailed as error:
        remedy = f"fix the recipe, or try it by hand: {kind} build --file {file} {context}"
        raise ImageError(f"{file} cannot be built by {kind}: {error.tail}", remedy) from error
    finally:
        with suppress(ProgramFailed):
            await run_program([engine, "rmi", "--force", tag])


def _recipe_file(recipe: Path) -> Path:
    if not recipe.is_dir():
        return recipe
    for name in RECIPES:
        if (recipe / name).is_file():
            return recipe / name
    raise ImageError(
        f"{recipe} has no {' or '.join(RECIPES)}", f"if it is a root folder, pull it: rollyard images pull {recipe}/"
    )


def _lacks_container(tail: str) -> bool:
    """Whether the cause is that the engine could not start a container for RUN, not an error in the recipe."""
    return any(word in tail.lower() for word in ("running runtime", "cgroup", "namespace", "crun", "runc", "conmon"))


async def _engine() -> str:
    """Returns the first container engine that responds: the docker command is useless without its daemon."""
    failures: list[str] = []
    for name in ENGINES:
        program = shutil.which(name)
        if program is None:
            continue
        try:
            await run_program([program, "version" if name == "buildah" else "info"])
            return program
        except ProgramFailed as error:
            failures.append(f"{name}: {error.tail.splitlines()[-1] if error.tail else error.status}")
    if failures:
        raise ImageError(
            f"no container engine works here ({'; '.join(failures)})", "start its daemon, or install podman"
        )
    raise ImageError(f"a Dockerfile needs one of {', '.join(ENGINES)}, and none was found", "apt-get install podman")
