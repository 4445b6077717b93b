"""Reads GGUF files: the metadata of a model, and its tensors as float32.

It uses numpy alone, for two reasons. The resulting weights do not depend on the installed version of another package,
so their digest can be pinned. And it takes a second, while transformers parses the same vocabulary five times (34 s for
SmolLM2-135M) and needs accelerate.

Only the tensor types of known models are supported; others are refused by name. Numbers are little-endian, of version
2 or 3 of the format.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = 32
"""The alignment of tensors, unless `general.alignment` is set."""

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9

Floats = NDArray[np.float32]
Values = dict[str, Any]
"""The fields of a file by name: numbers, booleans, strings, and lists of them."""


class BadGguf(Exception):
    """The file cannot be read; the message gives the reason."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """How numbers are packed: `numbers` of them in each block."""

    numbers: int
    block: np.dtype[Any]
    unpack: Callable[[Any], Floats]


def _plain(blocks: Any) -> Floats:
    return blocks["x"].astype(np.float32)


def _q8_0(blocks: Any) -> Floats:
    return blocks["scale"].astype(np.float32)[:, None] * blocks["x"].astype(np.float32)


def _q4_1(blocks: Any) -> Floats:
    """Two numbers per byte: the low halves are the first sixteen of a block, the high halves the others."""
    packed = blocks["x"]
    numbers = np.concatenate([packed & 15, packed >> 4], axis=1).astype(np.float32)
    return numbers * blocks["scale"].astype(np.float32)[:, None] + blocks["least"].astype(np.float32)[:, None]


_KINDS = {
    0: _Kind(1, np.dtype([("x", "<f4")]), _plain),
    1: _Kind(1, np.dtype([("x", "<f2")]), _plain),
    3: _Kind(32, np.dtype([("scale", "<f2"), ("least", "<f2"), ("x", "u1", 16)]), _q4_1),
    8: _Kind(32, np.dtype([("scale", "<f2"), ("x", "i1", 32)]), _q8_0),
}


@dataclass(frozen=True, slots=True)
class _Place:
    shape: tuple[int, ...]
    kind: int
    offset: int


class Gguf:
    """An open file, used as a context manager. `values` are its fields, `names` the names of its tensors."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            try:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except ValueError:
                raise BadGguf(f"{path.name} is empty") from None
        try:
            self.values, self._places, self._start = _Header(self._bytes).read()
        except (struct.error, UnicodeDecodeError) as error:
            self._bytes.close()
            raise BadGguf(f"{path.name} is cut off or damaged: {error}") from error
        except BadGguf:
            self._bytes.close()
            raise

    def __enter__(self) -> Gguf:
        return self

    def __exit__(self, *_: object) -> None:
        self._bytes.close()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._places)

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape with rows first, unlike GGUF itself."""
        return self._places[name].shape

    def tensor(self, name: str) -> Floats:
        """Returns a copy of the tensor."""
        place = self._places[name]
        kind = _KINDS.get(place.kind)
        if kind is None:
            raise BadGguf(f"{name} has the type {place.kind}, which is not supported")
        count, begin = prod(place.shape), self._start + place.offset
        if count % kind.numbers or begin + count // kind.numbers * kind.block.itemsize > len(self._bytes):
            raise BadGguf(f"{name} is cut off")
        # From a copy: an array over the map itself would prevent the map from being closed.
        size_bytes = count // kind.numbers * kind.block.itemsize
        blocks = np.frombuffer(self._bytes[begin : begin + size_bytes], kind.block)
        return kind.unpack(blocks).reshape(place.shape)


class _Header:
    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0

    def read(self) -> tuple[Values, dict[str, _Place], int]:
        if self._data[:4] != MAGIC:
            raise BadGguf("this is not a GGUF file")
        self._at = 4
        version = self._number("I")
        if version not in VERSIONS:
            raise BadGguf(f"version {version} of GGUF is not supported")
        tensors, fields = self._number("Q"), self._number("Q")
        values: Values = {}
        for _ in range(fields):
            name = self._string()
            values[name] = self._value(self._number("I"))
        places: dict[str, _Place] = {}
        for _ in range(tensors):
            name = self._string()
            shape = [self._number("Q") for _ in range(self._number("I"))]
            places[name] = _Place(tuple(reversed(shape)), self._number("I"), self._number("Q"))
        return values, places, -(-self._at // (step := values.get("general.alignment", ALIGNMENT))) * step

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            inner, count = self._number("I"), self._number("Q")
            if inner in _NUMBERS:
                return list(self._numbers(f"<{count}{_NUMBERS[inner]}"))
            return [self._value(inner) for _ in range(count)]
        if kind not in _NUMBERS:
            raise BadGguf(f"a field has the unknown type {kind}")
        return self._number(_NUMBERS[kind])

    def _number(self, letter: str) -> Any:
        return self._numbers("<" + letter)[0]

    def _numbers(self, format: str) -> tuple[Any, ...]:
        values = struct.unpack_from(format, self._data, self._at)
        self._at += struct.calcsize(format)
        return values

    def _string(self) -> str:
        begin = self._number("Q") + self._at
        self._at, begin = begin, self._at
        if self._at > len(self._data):
            raise BadGguf("a string extends beyond the end of the file")
        return self._data[begin : self._at].decode()
