"""The extra of this package that provides a module which is not installed."""

from __future__ import annotations

from importlib.util import find_spec

from rollyard.cli._console import CommandError

EXTRAS = {
    "server": (
        *("anyio", "fastapi", "h11", "httptools", "httpx", "httpx2", "huggingface_hub", "IPython", "jinja2"),
        *("latex2sympy2_extended", "math_verify", "mcp", "mcp_types", "orjson", "prometheus_client", "pydantic"),
        *("pydantic_core", "renderers", "starlette", "sympy", "tokenizers", "traitlets", "uvicorn", "uvloop", "yarl"),
    ),
    "local": ("accelerate", "gguf", "safetensors", "torch", "transformers", "triton"),
    "ray": ("ray",),
    "postgres": ("asyncpg", "greenlet"),
    "otel": ("opentelemetry",),
    "reasoning": ("reasoning_gym",),
    "swe": ("swebench",),
}
"""The modules that each extra installs, as they are imported."""


def extra_of(module: str | None) -> str | None:
    """The extra that provides a module, or None if no extra does."""
    root = (module or "").partition(".")[0]
    return next((extra for extra, modules in EXTRAS.items() if root in modules), None)


def require(extra: str) -> None:
    """Raises CommandError if a module of this extra is not installed. For commands that start other processes."""
    for module in EXTRAS[extra]:
        if not _is_installed(module):
            raise missing(module)


def missing(module: str) -> CommandError:
    """The error of a command that needs a module which is not installed."""
    what = f"this command needs the package {module}, which is not installed"
    return CommandError(what, f"pip install 'rollyard[{extra_of(module)}]'")


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ValueError:  # `sys.modules` has None for it
        return False
