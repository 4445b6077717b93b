"""Answers that get an item's full score, for the oracle.

Five families have no answer field, because many answers are right. Three of them store one in the metadata; `rush_hour`
and `boxnet` are solved here. `intermediate_integration` sometimes returns its question as the answer; it is computed
here. An item that still has no answer (a Rubik's cube larger than 3×3×3) has no oracle.
"""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_SIDE = 6
_EXIT = 2 * _SIDE + _SIDE - 2  # the position at which rush_hour's red car is out


def known_answers(entry: Mapping[str, Any]) -> Iterator[str]:
    """Candidates; the one with the highest score is right."""
    about = entry["metadata"]
    if entry["answer"] is not None:
        yield str(entry["answer"])
    match about.get("source_dataset"):
        case "intermediate_integration" if "Integral" in str(entry["answer"]):
            import sympy

            yield str(sympy.sympify(entry["answer"]).doit())  # the second try succeeds
        case "graph_color":
            yield json.dumps(about["possible_answer"])
        case "rubiks_cube":
            yield from filter(None, [about["example_correct_answer"]])
        case "propositional_logic":
            yield about["example_answer"]  # may be a guess
            yield from about["premises"]  # each follows from itself
        case "rush_hour":
            yield from filter(None, [rush_hour(about["board_config"])])
        case "boxnet":
            yield boxnet(about["initial_state"])


def rush_hour(board: str) -> str | None:
    """The fewest moves that free the red car, by breadth-first search."""
    labels = sorted(set(board) - {"o", "x"})
    cells = [[at for at, label in enumerate(board) if label == car] for car in labels]
    sizes, strides = [len(own) for own in cells], [own[1] - own[0] for own in cells]
    walls = {at for at, label in enumerate(board) if label == "x"}
    start = tuple(own[0] for own in cells)
    came: dict[tuple[int, ...], tuple[tuple[int, ...], str] | None] = {start: None}
    waiting = deque([start])
    while waiting:
        state = waiting.popleft()
        if state[0] == _EXIT:
            return _way(came, state)
        taken = walls | {
            head + step * stride
            for head, size, stride in zip(state, sizes, strides, strict=True)
            for step in range(size)
        }
        for car, (head, size, stride) in enumerate(zip(state, sizes, strides, strict=True)):
            for sign, front in ((-1, head), (1, head + (size - 1) * stride)):
                steps = 0
                while _is_free(front + sign * (steps + 1) * stride, front + sign * steps * stride, stride, taken):
                    steps += 1
                    moved = (*state[:car], head + sign * steps * stride, *state[car + 1 :])
                    if moved not in came:
                        came[moved] = (state, f"{chr(ord('A') + car)}{sign * steps:+d}")
                        waiting.append(moved)
    return None


def _is_free(to: int, at: int, stride: int, taken: set[int]) -> bool:
    is_on_board = 0 <= to < _SIDE * _SIDE and (stride != 1 or to // _SIDE == at // _SIDE)
    return is_on_board and to not in taken


def _way(came: Mapping[Any, Any], state: Any) -> str:
    moves: list[str] = []
    while came[state] is not None:
        state, move = came[state]
        moves.append(move)
    return " ".join(reversed(moves))


def boxnet(squares: Mapping[str, Sequence[str]]) -> str:
    """A plan that moves every box to a target of its colour, one step after another."""
    targets: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for square, items in squares.items():
        for item in items:
            if item.startswith("target_"):
                targets[item.removeprefix("target_")].append(_place(square))
    plan: list[dict[str, str]] = []
    for square, items in squares.items():
        for item in items:
            if item.startswith("box_"):
                colour = item.removeprefix("box_")
                plan += _carried(_place(square), targets[colour].pop(), colour)
    return json.dumps(plan)


def _carried(at: tuple[float, float], to: tuple[float, float], colour: str) -> Iterator[dict[str, str]]:
    while at != to:
        axis = 0 if at[0] != to[0] else 1
        step = 1.0 if to[axis] > at[axis] else -1.0
        following = (at[0] + step, at[1]) if axis == 0 else (at[0], at[1] + step)
        yield {_agent(at): f"move(box_{colour}, square[{following[0]}, {following[1]}])"}
        at = following
    yield {_agent(at): f"move(box_{colour}, target_{colour})"}


def _place(square: str) -> tuple[float, float]:
    row, column = square.split("_")
    return float(row), float(column)


def _agent(at: tuple[float, float]) -> str:
    return f"Agent[{at[0]}, {at[1]}]"
