"""The two tokenizers of these tests: the small one in the package, and Qwen3's, if it was downloaded."""

import json
import os
import shutil
from pathlib import Path

import pytest

from rollyard.testing.tokenizer_files import tokenizer_dir
from rollyard.tokens import ChatML, Tokenizer, Tokenizers, load_renderer


@pytest.fixture(scope="session")
def tokenizers() -> Tokenizers:
    return Tokenizers()


@pytest.fixture(scope="session")
def small(tokenizers: Tokenizers) -> Tokenizer:
    return tokenizers.load(tokenizer_dir())


@pytest.fixture(scope="session")
def chatml(small: Tokenizer) -> ChatML:
    return ChatML(small)


@pytest.fixture(scope="session")
def small_by_text(tmp_path_factory: pytest.TempPathFactory) -> ChatML:
    """Like SmolLM2's, in which <tool_call> and <think> are ordinary text."""
    folder = tmp_path_factory.mktemp("small_by_text")
    shutil.copytree(tokenizer_dir(), folder, dirs_exist_ok=True)
    file = folder / "tokenizer.json"
    raw = json.loads(file.read_text())
    raw["added_tokens"] = [token for token in raw["added_tokens"] if token["special"]]
    file.write_text(json.dumps(raw))
    return ChatML(Tokenizers().load(folder))


@pytest.fixture(scope="session")
def qwen3(tokenizers: Tokenizers) -> Tokenizer:
    root = Path(os.environ.get("ROLLYARD_TOKENIZERS", "~/.cache/rollyard/tokenizers")).expanduser()
    if not (root / "qwen3" / "tokenizer.json").is_file():
        pytest.skip(f"no Qwen3 tokenizer here: scripts/get-tokenizer qwen3 {root / 'qwen3'}")
    return tokenizers.load(root / "qwen3")


@pytest.fixture(scope="session")
def qwen3_renderer(qwen3: Tokenizer):
    return load_renderer(qwen3, "Qwen/Qwen3-0.6B")
