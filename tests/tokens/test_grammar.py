"""The grammar of a turn of calls: the renderer parses what it allows as calls."""

import json
import re

import pytest

from rollyard.testing.tokenizer_files import tokenizer_dir
from rollyard.tokens import Tokenizers
from rollyard.tokens.chatml import ChatML
from rollyard.tokens.grammar import hermes_calls

RENDERER = ChatML(Tokenizers().load(str(tokenizer_dir())))
_LITERAL = re.compile(r'"(?:[^"\\]|\\.)*"')


def rule(grammar: str, name: str) -> str:
    (line,) = (line for line in grammar.splitlines() if line.startswith(f"{name} ::= "))
    return line.removeprefix(f"{name} ::= ")


@pytest.mark.parametrize("arguments", ["{}", '{"path": "/", "n": [1, null]}'])
def test_text_of_the_grammar_parses_as_calls(arguments: str):
    grammar = RENDERER.call_grammar(["ls", "read.file"], is_one=True)
    assert grammar is not None and rule(grammar, "root") == "call"
    assert rule(grammar, "name") == '"ls" | "read.file"'
    before, between, after = (json.loads(text) for text in _LITERAL.findall(rule(grammar, "call")))
    turn = f"{before}read.file{between}{arguments}{after}"
    (call,) = RENDERER.parse(RENDERER.encode(turn)).tool_calls
    assert call.name == "read.file" and call.arguments == json.loads(arguments)
    several = RENDERER.call_grammar(["ls"], is_one=False)
    assert several is not None and rule(several, "root") == r'call ( "\n" call )*'
    assert len(RENDERER.parse(RENDERER.encode(f"{turn}\n{turn}")).tool_calls) == 2


@pytest.mark.parametrize("name", ["", 'a" | b', "a\\", "a\nb ::= c", "é", "x" * 129])
def test_a_tool_name_that_could_change_the_grammar_gets_no_grammar(name: str):
    assert hermes_calls([name], is_one=True) is None
    assert hermes_calls(["fine", name], is_one=False) is None
