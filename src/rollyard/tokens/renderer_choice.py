"""Selects the renderer of a model: by the renderer's name, by the model's name, or by trying its template."""

from __future__ import annotations

from pathlib import Path

from rollyard.core import Message
from rollyard.core.failure import InvalidRequest
from rollyard.tokens.base import Renderer
from rollyard.tokens.chatml import ChatML
from rollyard.tokens.tokenizer import Tokenizer

_PROBE: tuple[Message, ...] = (
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "One plus one?"},
    {"role": "assistant", "content": "Two."},
    {"role": "user", "content": "Und zwei plus zwei? 你好"},
)


def load_renderer(tokenizer: Tokenizer, model_name: str, renderer_name: str = "") -> Renderer:
    """The renderer for a model. Raises `InvalidRequest` with the choices. Imports are slow: call it off the event loop.

    An unknown model gets Rollyard's ChatML only if its template renders a small conversation to exactly the same
    tokens. Any other is rendered by its template, if that closes its turns (general.py).
    """
    if renderer_name == "chatml":
        try:
            return ChatML(tokenizer, _default_system(tokenizer))
        except ValueError as error:
            raise InvalidRequest(f"renderer 'chatml' does not fit: {error}") from error
    if renderer_name == "template":
        try:
            return _by_template(tokenizer)
        except ValueError as error:
            raise InvalidRequest(f"renderer 'template' does not fit: {error}") from error
    if renderer_name:
        from rollyard.tokens.library import LibraryRenderer

        return LibraryRenderer(tokenizer, renderer_name)
    for name in dict.fromkeys((model_name, tokenizer.name_or_path)):
        if name.count("/") == 1 and not Path(name).exists():  # only hub names: a look-up is expensive
            from rollyard.tokens.library import LibraryRenderer, library_name_of

            library_name = library_name_of(name)
            if library_name is not None:
                return LibraryRenderer(tokenizer, library_name)
    if _is_chatml(tokenizer):
        return ChatML(tokenizer, _default_system(tokenizer))
    try:
        return _by_template(tokenizer)
    except ValueError as error:
        from rollyard.tokens.library import library_names

        raise InvalidRequest(
            f"no renderer is known for model {model_name!r}, and its chat template is not plain ChatML ({error}); "
            f"name one for this engine (renderer): chatml, template, {', '.join(library_names())}"
        ) from error


def _by_template(tokenizer: Tokenizer) -> Renderer:
    from rollyard.tokens.general import TemplateRenderer

    return TemplateRenderer(tokenizer)


def _is_chatml(tokenizer: Tokenizer) -> bool:
    if not tokenizer.has_chat_template:
        return False
    try:
        templated = tokenizer.apply_chat_template(_PROBE, add_generation_prompt=True)
        return templated == ChatML(tokenizer).render(_PROBE)
    except Exception:  # a template may raise anything; then it is not plain ChatML
        return False


def _default_system(tokenizer: Tokenizer) -> str | None:
    """The system turn that the template adds to a conversation without one (Qwen2.5, SmolLM2)."""
    if not tokenizer.has_chat_template:
        return None
    try:
        text = tokenizer.apply_chat_template(_PROBE[1:2], tokenize=False)
    except Exception:  # the template requires a system turn
        return None
    head, _, _ = str(text).partition("<|im_start|>user")
    opening, closing = "<|im_start|>system\n", "<|im_end|>\n"
    if not head.startswith(opening) or not head.endswith(closing):
        return None
    return head[len(opening) : -len(closing)]
