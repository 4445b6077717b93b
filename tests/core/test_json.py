"""JSON values of any container type."""

import json
from types import MappingProxyType

import pytest

from rollyard.core.json import canonical, encode_container, to_builtins

NESTED = MappingProxyType({"b": (1, MappingProxyType({"c": ("x", None, True, 0.5)})), "a": "text"})
PLAIN = {"b": [1, {"c": ["x", None, True, 0.5]}], "a": "text"}


def test_mappings_and_sequences_become_dicts_and_lists_at_every_depth() -> None:
    assert to_builtins(NESTED) == PLAIN
    assert json.loads(json.dumps(NESTED, default=encode_container)) == PLAIN
    assert canonical(to_builtins(NESTED)) == canonical({"a": "text", "b": PLAIN["b"]})


@pytest.mark.parametrize("value", [b"bytes", {1, 2}, object()])
def test_what_has_no_json_form_is_refused(value: object) -> None:
    with pytest.raises(TypeError, match="has no JSON form"):
        to_builtins([value])
