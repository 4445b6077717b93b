"""Opens addresses in the user's browser."""

from __future__ import annotations

import os
import sys


def open_in_browser(url: str) -> bool:
    """Opens a URL. Returns False if there is no browser for it."""
    import webbrowser

    has_display = any(os.environ.get(name) for name in ("BROWSER", "DISPLAY", "WAYLAND_DISPLAY"))
    if not has_display and sys.platform.startswith("linux"):
        return False  # webbrowser would start a text browser, which runs no JavaScript
    return webbrowser.open(url)
