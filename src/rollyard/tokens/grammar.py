"""The grammar of a turn that calls a tool, for engines with constrained sampling (vLLM, SGLang: xgrammar's EBNF).

The arguments are any JSON object: the tool checks them against its schema, as it does without a grammar. Spaces are
optional and single, so that a model cannot sample spaces for ever.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")

_JSON = r"""
object ::= "{" ( "}" | ws pair ( "," ws pair )* ws "}" )
pair ::= string ":" ws value
array ::= "[" ( "]" | ws value ( "," ws value )* ws "]" )
value ::= object | array | string | number | "true" | "false" | "null"
string ::= "\"" ( [^"\\\x00-\x1f] | "\\" ( ["\\/bfnrt] | "u" [0-9a-fA-F] [0-9a-fA-F] [0-9a-fA-F] [0-9a-fA-F] ) )* "\""
number ::= "-"? ( "0" | [1-9] [0-9]* ) ( "." [0-9]+ )? ( [eE] [+-]? [0-9]+ )?
ws ::= [ \n]?
"""


def hermes_calls(names: Sequence[str], *, is_one: bool) -> str | None:
    """The grammar of a turn of calls in the Hermes format, to tools of these names: one call, or one and more. None if
    a name has characters that are not safe in a grammar."""
    if not names or not all(_NAME.fullmatch(name) for name in names):
        return None
    before = json.dumps('<tool_call>\n{"name": "')
    between = json.dumps('", "arguments": ')
    after = json.dumps("}\n</tool_call>")
    either = " | ".join(json.dumps(name) for name in names)
    root = "root ::= call" if is_one else 'root ::= call ( "\\n" call )*'
    return f"{root}\ncall ::= {before} name {between} object {after}\nname ::= {either}\n{_JSON.lstrip()}"
