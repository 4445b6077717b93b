"""Converts text to tokens and back with the model's tokenizer and chat template. Sampled tokens are never decoded and
encoded again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollyard.embedded.requests import Refused


class Texts:
    """Wraps a tokenizer of transformers or of `rollyard.tokens`. With None, every text is refused. Slow: call it in a
    thread."""

    def __init__(self, tokenizer: Any) -> None:
        self._optional_tokenizer = tokenizer

    def encode(self, text: str, *, has_special_tokens: bool) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=has_special_tokens)

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    def render(
        self, messages: Any, tools: Any = None, more: Mapping[str, Any] | None = None, *, is_asking: bool = True
    ) -> list[int]:
        """Renders messages. `is_asking` adds the start of the assistant's turn."""
        tokenizer, options = self._tokenizer, {**(more or {}), "tokenize": True, "return_dict": False}
        try:
            return tokenizer.apply_chat_template(
                messages, tools=tools or None, add_generation_prompt=is_asking, **options
            )
        except Exception as error:  # a template may raise anything
            raise Refused(f"the chat template rejects these messages: {error}") from None

    @property
    def _tokenizer(self) -> Any:
        if self._optional_tokenizer is None:
            raise Refused("this engine has no tokenizer: it accepts token ids only")
        return self._optional_tokenizer
