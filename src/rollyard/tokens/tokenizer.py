"""A model's tokenizer, loaded from its folder without torch or transformers.

`Tokenizers` loads and caches them, one per source; `Tokenizer` has the methods that chat templates and the `renderers`
package need.

Invariants. `encode` adds no tokens of its own (no BOS) unless `add_special_tokens` is set. Escaped text can never
become a special token: a file that contains "<|im_end|>" is encoded as that text, and does not end the turn. Escaping
does not change the text, only where it may be cut into tokens. A lone surrogate, which no tokenizer accepts, becomes
U+FFFD.

Nothing is downloaded here (`hub.py` does): a hub name must be in the local cache already.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rollyard.core import Json, Message
from rollyard.core.failure import InvalidRequest

if TYPE_CHECKING:
    from rollyard.tokens.template import ChatTemplate

BREAK = "\udfff"
"""Marks a cut inside escaped text. It is a lone surrogate, which no UTF-8 text contains, so it is unambiguous."""

SHORT_CHARS = 2048
"""Up to this length, a text is encoded by the faster call, which holds the GIL. The call for batches releases the GIL
while it runs, and leaves out the offsets."""

STEP_CHARS = 64 << 10
"""Characters per step of a search: about 1 ms. Between two steps another thread may get the GIL."""

_SURROGATE = re.compile("[\ud800-\udfff]")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json")
_REMEDY = "give a folder with tokenizer.json and tokenizer_config.json (scripts/get-tokenizer fetches well-known ones)"


class Tokenizer:
    """One model's vocabulary and chat template. Safe to share between threads."""

    def __init__(self, folder: Path, name: str = "") -> None:
        # a batch of one cannot be parallelised, and the library's threads do not survive a fork
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        import tokenizers  # 7 MB: imported only if needed

        self.name_or_path = name or str(folder)
        self._backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._backend.no_truncation()
        self._backend.no_padding()
        config = _json_file(folder / "tokenizer_config.json")
        template_file = folder / "chat_template.jinja"
        self._template_source: Json = (
            template_file.read_text(encoding="utf-8") if template_file.is_file() else config.get("chat_template")
        )
        self._template: ChatTemplate | None = None
        self.special_tokens: dict[str, str] = {}  # "eos_token" → "<|im_end|>", as templates name them
        for key in ("bos_token", "eos_token", "unk_token", "pad_token"):
            text = _token_text(config.get(key))
            if text:
                self.special_tokens[key] = text
        added = cast("Mapping[int, Any]", self._backend.get_added_tokens_decoder())
        self._added: tuple[str, ...] = tuple(str(token.content) for token in added.values())
        self._flags = {str(token.content): token for token in added.values()}
        self.all_special_tokens: list[str] = [str(token.content) for token in added.values() if token.special]
        longest_first = sorted((token for token in self._added if len(token) > 1), key=len, reverse=True)
        self._literal = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    @property
    def eos_token_id(self) -> int | None:
        return self.token_id(self.special_tokens.get("eos_token", ""))

    @property
    def unk_token_id(self) -> int | None:
        return self.token_id(self.special_tokens.get("unk_token", ""))

    @property
    def vocab_size(self) -> int:
        return self._backend.get_vocab_size(with_added_tokens=True)

    @cached_property
    def longest_token_chars(self) -> int:
        """The maximum number of characters of a text that one token encodes. A vocabulary consists of bytes or
        characters, so a token has at least as many letters as the text that it encodes; a normalizer combines at most
        three characters into one (the letters of a Hangul syllable)."""
        longest = max(map(len, self._backend.get_vocab(with_added_tokens=True)))
        return longest if self._backend.normalizer is None else 3 * longest

    @property
    def has_chat_template(self) -> bool:
        return bool(self._template_source)

    def template_contains(self, word: str) -> bool:
        """Whether the source of the chat template contains this word, for example the name of a role."""
        return word in json.dumps(self._template_source)

    def token_id(self, token: str) -> int | None:
        """The id of exactly this token, or None."""
        return self._backend.token_to_id(token) if token else None

    def special_id(self, token: str) -> int | None:
        """The same, but only for an added token, which is matched in a text before anything else."""
        return self.token_id(token) if token in self._added else None

    def is_boundary(self, token: str) -> bool:
        """Whether text may be cut before and after this token and encoded in pieces: the token is matched before
        anything else, absorbs no text around it, and is part of no other such token."""
        flags = self._flags.get(token)
        if flags is None or flags.lstrip or flags.rstrip or flags.single_word or flags.normalized:
            return False
        return not any(token in other for other in self._added if other != token)

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> int | list[int | None] | None:
        if isinstance(tokens, str):
            token_id = self.token_id(tokens)
            return self.unk_token_id if token_id is None else token_id
        return [cast("int | None", self.convert_tokens_to_ids(token)) for token in tokens]

    def escape(self, text: str) -> str:
        """The same text, of which no part becomes a special token."""
        if len(text) <= STEP_CHARS:
            return self._escaped(text)
        return "".join(map(self._escaped, self._steps(text)))

    def _escaped(self, text: str) -> str:
        text = _SURROGATE.sub("�", text)
        if self._literal is None:
            return text
        return self._literal.sub(lambda match: match[0][0] + BREAK + match[0][1:], text)

    def _steps(self, text: str) -> Iterator[str]:
        """The text in pieces, cut outside of special tokens: a search over megabytes would block every thread."""
        at, longest = 0, max((len(token) for token in self._added), default=0)
        while at < len(text):
            end = at + STEP_CHARS
            cut = None if self._literal is None else self._literal.search(text, max(at, end - longest), end + longest)
            while cut is not None and cut.end() <= end:
                assert self._literal is not None
                cut = self._literal.search(text, cut.end(), end + longest)
            if cut is not None and cut.start() < end:
                end = cut.end()
            yield text[at:end]
            at = end

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """The ids of a text. `add_special_tokens`: with the tokens that the model's tokenizer adds around a bare text,
        which templates do not need."""
        if add_special_tokens:
            return self._backend.encode(_SURROGATE.sub("�", text), add_special_tokens=True).ids
        if BREAK not in text:
            try:
                return self._ids(text)
            except (TypeError, UnicodeEncodeError):
                return self._ids(_SURROGATE.sub("�", text))
        ids: list[int] = []
        for part in text.split(BREAK):
            if part:
                ids += self.encode(part)
        return ids

    def _ids(self, text: str) -> list[int]:
        try:
            if len(text) <= SHORT_CHARS:
                return self._backend.encode(text, add_special_tokens=False).ids
            (encoded,) = self._backend.encode_batch_fast([text], add_special_tokens=False)
            return encoded.ids
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # from Rust: not an Exception, and not importable
                raise
            raise InvalidRequest(f"the tokenizer cannot encode this text: {str(error)[:200]}") from None

    def decode(self, ids: int | Iterable[int], skip_special_tokens: bool = False, **_: object) -> str:
        return self._backend.decode(
            [ids] if isinstance(ids, int) else list(ids), skip_special_tokens=skip_special_tokens
        )

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Json]] | None = None,
        *,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        return_dict: bool = False,
        **variables: Json,
    ) -> list[int] | str:
        """Renders the model's Jinja template, as its authors' library would."""
        if return_dict:
            raise ValueError("return_dict is not supported: only plain ids are returned")
        if self._template is None:
            from rollyard.tokens.template import ChatTemplate

            self._template = ChatTemplate(self._template_source, self.special_tokens)
        text = self._template.fill(messages, tools, add_generation_prompt=add_generation_prompt, variables=variables)
        return self.encode(text) if tokenize else text


class Tokenizers:
    """Loads each source once. The service holds one; there is no global."""

    def __init__(self) -> None:
        self._loaded: dict[str, Tokenizer] = {}
        self._lock = threading.Lock()

    def load(self, source: str | Path, name: str = "") -> Tokenizer:
        """Loads a tokenizer from a folder or a cached hub name. It reads megabytes: call it off the event loop. `name`
        is the tokenizer's name, if the folder is a copy."""
        key = str(source)
        with self._lock:
            if key not in self._loaded:
                self._loaded[key] = Tokenizer(find_folder(key), name=name or key)
            return self._loaded[key]


def find_folder(source: str) -> Path:
    """The folder with the files of a source: a folder or a cached hub name. Raises `InvalidRequest` if missing."""
    path = Path(source).expanduser()
    if path.is_dir():
        missing = [name for name in TOKENIZER_FILES[:2] if not (path / name).is_file()]
        if missing:
            raise InvalidRequest(f"tokenizer {source!r}: the folder lacks {' and '.join(missing)}; {_REMEDY}")
        return path
    if not is_hub_name(source):
        raise InvalidRequest(f"tokenizer {source!r} is neither a folder nor a hub name; {_REMEDY}")
    snapshot_download: Callable[..., str] = import_module("huggingface_hub").snapshot_download
    try:
        snapshot = snapshot_download(source, allow_patterns=list(TOKENIZER_FILES), local_files_only=True)
    except Exception as error:  # its exceptions differ between versions; all mean that the files are missing
        raise InvalidRequest(
            f"tokenizer {source!r} is not in the local hub cache, and nothing is downloaded here: "
            f"run `{hub_command(source)}` where there is a network, or {_REMEDY}"
        ) from error
    return find_folder(snapshot)


def is_hub_name(name: str) -> bool:
    return re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name) is not None


def hub_command(name: str) -> str:
    """The command that downloads a tokenizer with its chat template into the hub cache."""
    return f"hf download {name} --include 'tokenizer*' 'chat_template*' 'special_tokens_map.json'"


def _json_file(path: Path) -> dict[str, Json]:
    return json.loads(path.read_text(encoding="utf-8"))


def _token_text(value: Json) -> str:
    """The text of a token, which configs contain as a string or as {"content": …}."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else ""
