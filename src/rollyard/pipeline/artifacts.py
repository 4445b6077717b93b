"""Artifacts: files that RUN left, stored outside the sandbox so that EVAL can score them later, elsewhere, or again.

There is one folder per rollout and attempt below `root`, named by a hash of the rollout's id: an id that a client chose
is never a path. A file is valid only after fsync and rename; its digest is checked when it is read back.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from rollyard.core import Artifact
from rollyard.core.failure import ArtifactLost
from rollyard.core.files import replacing
from rollyard.envs.base import ArtifactRule
from rollyard.sandbox.base import Sandbox


class ArtifactFolder:
    """Saves, stores and loads artifacts below `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root

    async def save(
        self, sandbox: Sandbox, rules: Iterable[ArtifactRule], rollout_id: str, attempt: int
    ) -> list[Artifact]:
        """Copies the paths that `rules` name out of a running sandbox.

        Skips a path that does not exist or exceeds its limit: the environment's EVAL decides how to score that.
        """
        folder = self._folder(rollout_id) / str(attempt)
        saved: list[Artifact] = []
        for rule in rules:
            target = folder / _file_name(rule.name)
            partial = target.with_suffix(".part")
            try:
                await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
                try:
                    kind = await sandbox.download(rule.path, partial, limit_bytes=rule.limit_bytes)
                except (FileNotFoundError, ValueError):
                    await asyncio.to_thread(partial.unlink, missing_ok=True)
                    continue
                saved.append(await asyncio.to_thread(_settle, rule, kind, partial, target))
            except OSError as error:
                raise ArtifactLost(f"artifact {rule.name!r} could not be saved: {error}") from error
        return saved

    async def receive(self, name: str, data: bytes, rollout_id: str, attempt: int) -> None:
        """Stores an artifact that another machine saved. Raises `ArtifactLost` if it cannot be written."""
        target = self._folder(rollout_id) / str(attempt) / _file_name(name)
        try:
            await asyncio.to_thread(_write, target, data)
        except OSError as error:
            raise ArtifactLost(f"artifact {name!r} could not be saved: {error}") from error

    async def load(self, artifact: Artifact, rollout_id: str, attempt: int) -> Path:
        """Returns the path of the saved file after checking its digest. Raises `ArtifactLost`."""
        path = self._folder(rollout_id) / str(attempt) / _file_name(artifact.name)
        try:
            digest = await asyncio.to_thread(_sha256, path)
        except OSError as error:
            raise ArtifactLost(f"artifact {artifact.name!r} cannot be read: {error}") from error
        if digest != artifact.sha256:
            raise ArtifactLost(f"artifact {artifact.name!r} has changed since it was saved (its digest differs)")
        return path

    async def has(self, artifact: Artifact, rollout_id: str, attempt: int) -> bool:
        """Returns whether the file exists. `load` also checks it."""
        path = self._folder(rollout_id) / str(attempt) / _file_name(artifact.name)
        return await asyncio.to_thread(path.exists)

    async def clear(self) -> None:
        """Deletes all artifacts."""
        await asyncio.to_thread(shutil.rmtree, self.root, ignore_errors=True)

    async def delete(self, rollout_id: str) -> None:
        await asyncio.to_thread(shutil.rmtree, self._folder(rollout_id), ignore_errors=True)

    def _folder(self, rollout_id: str) -> Path:
        name = hashlib.blake2b(rollout_id.encode(), digest_size=16).hexdigest()
        return self.root / name[:2] / name


def _file_name(name: str) -> str:
    return hashlib.blake2b(name.encode(), digest_size=12).hexdigest()


def _write(target: Path, data: bytes) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with replacing(target, is_durable=True) as file:
        file.write(data)


def _settle(rule: ArtifactRule, kind: Literal["file", "tar"], partial: Path, target: Path) -> Artifact:
    """Fsyncs and renames the file, and computes its digest. The artifact is valid only after this."""
    with partial.open("rb") as file:
        os.fsync(file.fileno())
    partial.replace(target)
    return Artifact(rule.name, rule.path, target.stat().st_size, _sha256(target), kind)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
