"""How a submit is split into calls."""

import msgspec
import pytest

from rollyard.client import _bodies
from rollyard.client._bodies import encoded, in_calls


def split(*items: object) -> list[tuple[int, list[object]]]:
    return [(first, [msgspec.json.decode(item) for item in part]) for first, part in in_calls([*map(encoded, items)])]


def test_a_call_has_few_items_few_bytes_and_few_values(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_bodies, "MOST_ITEMS", 3)
    monkeypatch.setattr(_bodies, "MOST_BYTES", 20)
    monkeypatch.setattr(_bodies, "MOST_MARKS", 6)
    assert split() == []
    assert split(1, 2, 3, 4) == [(0, [1, 2, 3]), (3, [4])]
    small, large, larger = "x" * 6, "y" * 12, "z" * 100
    assert split(small, large, small, larger, small) == [
        (0, [small]),
        (1, [large]),
        (2, [small]),
        (3, [larger]),
        (4, [small]),
    ]
    assert split([1, 2, 3], [[], []], [{}], [0] * 9) == [(0, [[1, 2, 3]]), (1, [[[], []], [{}]]), (3, [[0] * 9])]
