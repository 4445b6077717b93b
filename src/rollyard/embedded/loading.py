# pyright: reportMissingImports=false
"""Loads a model and its tokenizer by name, without transformers where that is possible.

Importing transformers takes longer than importing torch, so it is imported only when it is needed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from rollyard.core.failure import InvalidRequest
from rollyard.embedded.formats.checkpoint import Checkpoint, NotKnown, read_checkpoint
from rollyard.embedded.transformer.model import Unsupported, load_module, weights_place
from rollyard.tokens.tokenizer import Tokenizer, find_folder


def load_model(name: str | Path, *, device: str, dtype: Any = "auto") -> Checkpoint | Any:
    """Returns a model for `Engine.serve`: a folder's weights for a CPU (`llama.py`), or a transformers module."""
    if device == "cpu" and dtype is torch.float32:
        try:
            return read_checkpoint(Path(name))
        except NotKnown:
            pass
    return load_module(name, device=device, dtype=dtype)


def load_tokenizer(name: str | Path) -> Any:
    """Returns a `rollyard.tokens` tokenizer if the folder has the necessary files, else one of transformers."""
    folder, more = weights_place(name)
    if not more and Path(folder).is_dir():
        try:
            return Tokenizer(find_folder(folder), name=folder)
        except InvalidRequest:
            pass
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, **more)
    except (OSError, ValueError, ImportError) as error:
        raise Unsupported(f"the tokenizer of {name} cannot be loaded: {str(error).splitlines()[0]}") from error
