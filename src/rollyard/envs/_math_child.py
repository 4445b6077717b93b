"""The process that runs `math-verify`: one JSON line in, one out, over the socket that is its standard input.

In:  ["the known answer", "the agent's answer"]     Out: {"same": true} or {"error": "…"}; {"ready": true} at first.
"""

from __future__ import annotations

import json
import logging
import resource
import socket
from collections.abc import Callable, Sequence
from typing import Any, cast

MEMORY_BYTES = 4 << 30


def same(known: str, answer: str) -> bool:
    """Whether both mean the same to math-verify, or are the same text."""
    from math_verify import parse, verify

    if known.strip() == answer.strip():
        return True
    read = cast("Callable[[str], Sequence[Any]]", parse)
    gold, given = read(_as_latex(known)), read(_as_latex(answer))
    return bool(gold and given) and bool(verify(list(gold), list(given)))


def _as_latex(text: str) -> str:
    return text if "$" in text or "\\boxed" in text else f"\\boxed{{{text}}}"


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    logging.disable(logging.CRITICAL)
    same("1", "2")  # imports, and builds the grammars, before it says that it is ready
    with socket.socket(fileno=0) as connection, connection.makefile("rwb") as stream:
        stream.write(b'{"ready": true}\n')
        stream.flush()
        for line in stream:
            known, answer = json.loads(line)
            try:
                reply: dict[str, Any] = {"same": same(known, answer)}
            except Exception as error:
                reply = {"error": f"{type(error).__name__}: {error}"[:500]}
            stream.write(json.dumps(reply).encode() + b"\n")
            stream.flush()


if __name__ == "__main__":
    main()
