"""The HTTP API: settings, authentication, problem responses, routes, and the composition of a whole service."""

from rollyard.service.settings import EngineSettings, Loaded, Settings, SettingsError, load_settings

__all__ = ["EngineSettings", "Loaded", "Settings", "SettingsError", "load_settings"]
