"""Inspects a script's text: its interpreter, and whether it downloads something."""

from __future__ import annotations

import re

_FETCHES = re.compile(
    r"\b(apt-get|apt|apk|dnf|yum|microdnf|conda|mamba)\s+(-\S+\s+)*(update|install|add|upgrade)\b"
    r"|\b(pip3?|pipx|npm|pnpm|yarn|gem|cargo|go|uv\s+(pip|tool))\s+(-\S+\s+)*(install|add|get)\b"
    r"|\buvx\s|\bnpx\s|\buv\s+(run|add|sync)\b|\bnpm\s+ci\b|\bgit\s+clone\s+\S*(https?|git|ssh)\b"
    r"|\b(curl|wget)\b[^\n]*(https?|ftp)://(?!localhost|127\.|0\.0\.0\.0|\[::1\])"
)

_SYSTEMS = re.compile(r"\b(apt-get|apt|apk|dnf|yum|microdnf)\s+(-\S+\s+)*(update|install|add|upgrade)\b")


def fetching_line(script: str) -> str | None:
    """The first line that needs a network. Comments do not count."""
    for line in script.splitlines():
        plain = line.strip()
        if not plain.startswith("#") and _FETCHES.search(plain + " "):
            return plain
    return None


def needs_root(line: str) -> bool:
    """Whether the line installs system packages."""
    return _SYSTEMS.search(f"{line} ") is not None


def command_of(script: str, path: str) -> list[str]:
    """The command that runs the script at `path`: by its shebang line, else with bash."""
    return [path] if script.startswith("#!") else ["bash", path]


def interpreter_of(script: str) -> str:
    """The program that the command needs."""
    if not script.startswith("#!"):
        return "bash"
    words = script.splitlines()[0][2:].split()
    if words and words[0].endswith("/env"):
        words = [word for word in words[1:] if not word.startswith("-") and "=" not in word]
    return words[0] if words else "bash"
