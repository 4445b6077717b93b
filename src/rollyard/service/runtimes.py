"""Creates a runtime by its name, configured by the operator's settings."""

from __future__ import annotations

from pathlib import Path

from rollyard.core.texts import unknown
from rollyard.sandbox import ApptainerRuntime, BubblewrapRuntime, LocalRuntime, OciRuntime
from rollyard.sandbox.limits.limiter import Limiter
from rollyard.sandbox.python import PythonBuilds
from rollyard.service.settings import Settings, SettingsError

AnyRuntime = BubblewrapRuntime | ApptainerRuntime | OciRuntime | LocalRuntime

NAMES = ("bubblewrap", "apptainer", "oci", "local")


def make_runtime(name: str, settings: Settings, root: Path | None = None) -> AnyRuntime:
    """A runtime that is not open yet. `root`: the folder of its sandboxes' files, if not below data_dir."""
    root = root or settings.data_dir / "sandboxes" / name
    limits = settings.sandbox_limits
    match name:
        case "bubblewrap":
            return BubblewrapRuntime(root=root, uids=uids_of(name, settings), limiter=Limiter(limits))
        case "apptainer":
            return ApptainerRuntime(root=root, uids=uids_of(name, settings), limiter=Limiter(limits))
        case "oci":
            image = settings.oci_image or None
            pythons = PythonBuilds(settings.data_dir / "python")
            return OciRuntime(root=root, command=settings.oci_command, image=image, defaults=limits, pythons=pythons)
        case "local":
            return LocalRuntime(root=root)
    raise SettingsError(unknown("runtime", name, NAMES), "correct --runtime or the setting `runtimes`")


def uids_of(name: str, settings: Settings) -> range | None:
    """The runtime's share of `sandbox_uids`: each runtime assigns a uid per sandbox, and no two may assign the same."""
    sharing = [each for each in dict.fromkeys(settings.runtimes) if each in ("bubblewrap", "apptainer")]
    uids = settings.uid_range
    if uids is None or name not in sharing:
        return uids
    share = uids[sharing.index(name) :: len(sharing)]
    if not share:  # an empty range would mean root
        raise SettingsError(f"sandbox_uids: there are fewer uids than runtimes ({', '.join(sharing)})")
    return share
