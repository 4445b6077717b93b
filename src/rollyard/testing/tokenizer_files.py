"""A small real tokenizer (byte-level BPE, ChatML template) that comes with the package: tests need no download.

`scripts/make-test-tokenizer` made it.
"""

from __future__ import annotations

from pathlib import Path


def tokenizer_dir() -> Path:
    """The folder with tokenizer.json and tokenizer_config.json."""
    return Path(__file__).parent / "tokenizer"
