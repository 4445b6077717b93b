"""Checks of `rollyard doctor` for environments and agents of other packages: whether they can be loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollyard.cli.doctor.check import DoctorCheck

if TYPE_CHECKING:
    from rollyard.service.settings import Settings


async def plugin_checks(settings: Settings) -> list[DoctorCheck]:
    """One check for each that cannot be loaded, or one for all of them. Asynchronous, because an environment may need
    an event loop when it is created."""
    from rollyard.agents.registry import GROUP as AGENTS
    from rollyard.agents.registry import Agents
    from rollyard.envs.registry import GROUP as ENVIRONMENTS
    from rollyard.plugins import is_own, plugins
    from rollyard.service.machine import all_environments

    async with all_environments(settings) as environments:
        broken = {
            **{f"environment {name}": why for name, why in environments.load_all().items()},
            **{f"agent {name}": why for name, why in Agents().load_all().items()},
        }
    if broken:
        remedy = "fix that package, or uninstall it; other environments and agents work"
        return [DoctorCheck(name, "warn", why, remedy) for name, why in broken.items()]
    counts = [sum(not is_own(point) for point in plugins(group)) for group in (ENVIRONMENTS, AGENTS)]
    return [DoctorCheck("plugins", "ok", f"{counts[0]} environments and {counts[1]} agents of other packages")]
