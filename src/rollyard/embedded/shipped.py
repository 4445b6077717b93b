"""The LoRA adapters in this package, by name, and whether an adapter was trained on a model's weights. Needs no torch.

An adapter's folder has PEFT's two files. Those that Rollyard trained have `adapter.json` as well, which identifies
their base weights by digest (`base_digest`).
"""

from __future__ import annotations

import json
from difflib import get_close_matches
from pathlib import Path

from rollyard.embedded import SHIPPED
from rollyard.embedded.formats.sources import WeightsError
from rollyard.embedded.weights import AUTO, KnownModel, weights_digest

_CONFIG = "adapter_config.json"


def shipped_adapter(name: str) -> Path:
    """Returns the folder of an adapter of this package, which may be missing from an incomplete copy."""
    return Path(__file__).parent / "trained" / name


def find_adapter(name: str) -> Path:
    """Returns the folder of an adapter: `name` itself if it is one, else that of a shipped adapter. No network is
    used."""
    folder = Path(name).expanduser()
    if (folder / _CONFIG).is_file():
        return folder
    if name in SHIPPED:
        if not (shipped_adapter(name) / _CONFIG).is_file():
            raise WeightsError(f"this copy of rollyard has no adapter {name}", "install rollyard again")
        return shipped_adapter(name)
    shipped = f"give a folder that PEFT has written, or a shipped adapter: {', '.join(SHIPPED)}"
    if folder.is_dir():
        raise WeightsError(f"there is no adapter in {folder}: it has no {_CONFIG}", shipped)
    near = get_close_matches(name, SHIPPED, 1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise WeightsError(f"there is no adapter {name}{hint}", shipped)


def base_digest(adapter: Path) -> str | None:
    """Returns the digest of the weights that the adapter was trained on. None: saved by another trainer."""
    try:
        digest = json.loads((adapter / "adapter.json").read_text()).get("base_digest")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, AttributeError) as error:
        raise WeightsError(f"{adapter / 'adapter.json'} cannot be read: {error}") from error
    return digest if isinstance(digest, str) else None


def source_for(adapter: Path, model: KnownModel) -> str:
    """Returns the source of a known model that has the weights of the adapter; `auto` if that is unknown."""
    digest = base_digest(adapter)
    return next((name for name, source in model.sources.items() if source.weights_sha256 == digest), AUTO)


def check_base(adapter: Path, model: Path) -> None:
    """Raises WeightsError if the adapter was trained on other weights: with these, its output would be useless."""
    expected = base_digest(adapter)
    if expected is not None and expected != (actual := weights_digest(model)):
        raise WeightsError(
            f"the adapter in {adapter} belongs to other weights (sha256 {expected}) than {model} has ({actual})"
        )
