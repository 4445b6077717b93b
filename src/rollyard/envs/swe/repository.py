"""Computes the changes in a repository as a patch, whatever the agent did to the repository itself.

It uses git, but not the repository's own `.git`: the agent may commit, stage, rebase, configure filters, or remove it.
`base` creates a second git directory, outside the work tree, with the tracked files of the image; `diff` compares the
work tree with it, and `apply` applies the patch in another sandbox of the image. All three set their own attributes and
configuration, so every byte is preserved: binary files, CRLF, modes, links.

Files that are untracked or ignored in the image are not part of the patch, nor are nested repositories (submodules).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from rollyard.core.failure import SetupDeadline, SetupFailed
from rollyard.sandbox.base import ExecResult, Sandbox

FOLDER = "/var/tmp/rollyard-swe"  # not on a tmpfs, so that a layer includes it
GIT_DIR = f"{FOLDER}/base.git"
PATCH = f"{FOLDER}/solution.patch"

PATCH_BYTES = 32 << 20
"""A larger patch does not solve an issue; it contains build results."""

LISTING_BYTES = 64 << 20
"""The limit for the list of a repository's files: the largest public ones have about 100,000."""

TAIL_BYTES = 2000

_QUIET = {"GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": "/dev/null", "HOME": "/nonexistent", "LC_ALL": "C"}
"""Only the git directory's configuration applies: RUN may have written one to HOME."""

_OWN = {**_QUIET, "GIT_DIR": GIT_DIR, "GIT_WORK_TREE": "."}

SAFE = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*"}
"""In the image the repository may belong to another user than the sandbox's; git would refuse it."""

_REPOSITORY_ENV = {**_QUIET, **SAFE}  # for the repository's own `.git`

_ATTRIBUTES = "* -text -ident -filter -working-tree-encoding !diff !merge !eol !whitespace\n"
"""The git directory's attributes, which override any `.gitattributes`."""

_LEFTOVERS = b"__pycache__/\n*.py[co]\n.pytest_cache/\n.mypy_cache/\n.ruff_cache/\n"
"""Build and test artifacts; ignored when making the patch."""

_HIDE = """
set -e
git remote | while read -r name; do git remote remove "$name"; done
git for-each-ref --format='delete %(refname)' --no-merged HEAD | git update-ref --no-deref --stdin
git reflog expire --expire=now --expire-unreachable=now --all
cd "$(git rev-parse --git-dir)" && rm -f FETCH_HEAD ORIG_HEAD
"""
"""Removes all references to commits outside HEAD's history: a later commit contains the fix."""


async def remove_later_history(sandbox: Sandbox, workdir: str, *, timeout_s: float) -> None:
    """Removes remotes, later branches and tags, and reflogs from the repository. Objects remain, unreferenced."""
    await _checked_output(sandbox, _HIDE, workdir, _REPOSITORY_ENV, "hiding later commits", timeout_s)


async def base(sandbox: Sandbox, workdir: str, *, timeout_s: float) -> None:
    """Creates the second git directory from the tracked files. Raises SetupFailed if there is no repository."""
    files = await _checked_output(
        sandbox,
        ["git", "ls-files", "-z", "--stage"],
        workdir,
        _REPOSITORY_ENV,
        f"no git repository in {workdir}",
        timeout_s,
    )
    others = await _checked_output(
        sandbox,
        ["git", "ls-files", "-z", "--others", "--exclude-standard", "--directory"],
        workdir,
        _REPOSITORY_ENV,
        "listing untracked files",
        timeout_s,
    )
    tracked = [line.partition(b"\t")[2] for line in files.split(b"\0") if line and not line.startswith(b"160000 ")]
    excluded = _LEFTOVERS + b"".join(_ignoring(name) + b"\n" for name in others.split(b"\0") if name)
    await make(sandbox, workdir, timeout_s=timeout_s)
    await sandbox.write(f"{GIT_DIR}/info/exclude", excluded)
    command = (
        "git update-index --add --remove -z --stdin && git update-ref refs/base $(git write-tree)"
        " && cp $GIT_DIR/index $GIT_DIR/index.base"
    )
    listing = b"".join(name + b"\0" for name in tracked)
    await _checked_output(sandbox, command, workdir, _OWN, "keeping the base", timeout_s, listing)


async def make(sandbox: Sandbox, workdir: str, *, timeout_s: float) -> None:
    """Creates an empty second git directory."""
    command = f"rm -rf {GIT_DIR} && mkdir -p {FOLDER} && git init -q && git config core.compression 1"
    for name, value in (("fileMode", "true"), ("autocrlf", "false"), ("safecrlf", "false"), ("hooksPath", "/dev/null")):
        command += f" && git config core.{name} {value}"
    command += " && git config apply.whitespace nowarn && mkdir -p $GIT_DIR/info"
    await _checked_output(sandbox, command, workdir, _OWN, "git init", timeout_s)
    await sandbox.write(f"{GIT_DIR}/info/attributes", _ATTRIBUTES.encode())


async def diff(sandbox: Sandbox, workdir: str, *, timeout_s: float) -> None:
    """Writes all changes since `base` to PATCH. Fails silently: a missing patch scores 0."""
    command = (
        f"rm -rf {PATCH}; export GIT_INDEX_FILE=$GIT_DIR/index.new; cp $GIT_DIR/index.base $GIT_INDEX_FILE;"
        # continue after errors, such as an empty repository somewhere in the tree
        " git add --all --ignore-errors .;"
        " git diff --cached --binary --full-index --no-renames --no-ext-diff --no-textconv --no-color"
        f" --ignore-submodules=all --src-prefix=a/ --dst-prefix=b/ --output={PATCH} refs/base"
    )
    await sandbox.exec(command, timeout_s=timeout_s, cwd=workdir, env=_OWN)


async def files(sandbox: Sandbox, workdir: str, *, without: Iterable[str] = (), timeout_s: float) -> int:
    """How many files PATCH changes, not counting those that match `without`; 0 if it is not a patch."""
    arguments = ["apply", "--numstat", "-z", *_excluding(without), PATCH]
    result = await _git(sandbox, arguments, workdir, timeout_s)
    return result.stdout.count(b"\0") if result.status == 0 and not result.dropped_bytes else 0


async def has_renames(sandbox: Sandbox, workdir: str, *, without: Iterable[str] = (), timeout_s: float) -> bool:
    """Whether PATCH renames or copies files. `diff` writes no such patch, and `apply` would compare only the new names
    with its patterns: an old one that must stay would disappear. Git's summary does not show a section that names two
    files and does not call it a rename; a check shows every file with two names."""
    result = await _git(sandbox, ["apply", "--check", "--verbose", *_excluding(without), PATCH], workdir, timeout_s)
    is_unknown = result.is_timed_out or bool(result.dropped_bytes)
    lines = result.stderr.splitlines()
    return is_unknown or any(line.startswith(b"Checking patch ") and b" => " in line for line in lines)


async def apply(
    sandbox: Sandbox,
    workdir: str,
    patch: str | bytes,
    *,
    without: Iterable[str] = (),
    is_only_tried: bool = False,
    timeout_s: float,
) -> str | None:
    """Applies a patch (its content, or the path of a file) completely or not at all, except for files that match the
    patterns `without`, in which * also matches slashes. Returns None, or why it did not apply."""
    stdin, source = (patch, "-") if isinstance(patch, bytes) else (b"", patch)
    options = [*_excluding(without), *(["--check"] if is_only_tried else [])]
    result = await _git(sandbox, ["apply", *options, source], workdir, timeout_s, stdin)
    if result.status == 0:
        return None
    return result.stderr[-TAIL_BYTES:].decode("utf-8", "replace").strip() or f"git ended with {result.status}"


async def _git(
    sandbox: Sandbox, arguments: Sequence[str], workdir: str, timeout_s: float, stdin: bytes = b""
) -> ExecResult:
    return await sandbox.exec(
        ["git", *arguments], timeout_s=timeout_s, cwd=workdir, env=_OWN, stdin=stdin, output_bytes=LISTING_BYTES
    )


async def _checked_output(
    sandbox: Sandbox,
    command: str | Sequence[str],
    workdir: str,
    env: dict[str, str],
    what: str,
    timeout_s: float,
    stdin: bytes = b"",
) -> bytes:
    result = await sandbox.exec(
        command, timeout_s=timeout_s, cwd=workdir, env=env, stdin=stdin, output_bytes=LISTING_BYTES
    )
    if result.is_timed_out:
        raise SetupDeadline(f"{what}: not done within {timeout_s:g} s")
    if result.status != 0 or result.dropped_bytes:
        tail = result.stderr[-TAIL_BYTES:].decode("utf-8", "replace").strip()
        raise SetupFailed(f"{what}: {tail or f'status {result.status}'}", status=result.status)
    return result.stdout


def _ignoring(name: bytes) -> bytes:
    """A line of `info/exclude` for exactly this name. A name with a line break cannot be written and is not ignored."""
    return b"" if b"\n" in name else b"/" + re.sub(rb"([\\*?\[\] ])", rb"\\\1", name)


def _excluding(patterns: Iterable[str]) -> list[str]:
    return [f"--exclude={pattern}" for pattern in patterns]
