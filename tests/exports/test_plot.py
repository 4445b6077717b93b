"""Plots: SVG files and lines for a terminal, in the dashboard's colours."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

import pytest

from rollyard.exports.plot import colours, plot_of, svg, terminal, ticks

SVG = "{http://www.w3.org/2000/svg}"


def series(**fields: Any) -> dict[str, Any]:
    known = {"by": "version", "x": [1, 2, 3, 4], "reward": [0.1, None, 0.5, 0.9], "pass_rate": [0, 0, 0.25, 0.5]}
    return {**known, **fields}


def test_a_file_has_both_curves_with_gaps_in_the_colours_of_the_page():
    text = svg(plot_of("run <a>", series()))
    root = ElementTree.fromstring(text)
    curves = [path.attrib["class"] for path in root.iter(f"{SVG}path") if path.attrib["class"].startswith("curve")]
    assert curves == ["curve s1", "curve s1", "curve s2", "curve s2"], (
        "a legend, and one piece of each: a gap before it"
    )
    assert len([circle for circle in root.iter(f"{SVG}circle") if circle.attrib["class"] == "dot1"]) == 3
    texts = [element.text for element in root.iter(f"{SVG}text")]
    assert {"run <a>", "mean reward", "pass rate", "weight version", "1", "4"} <= {*texts}
    for name in ("--series-1", "--series-2"):
        for is_dark in (False, True):
            assert colours(is_dark=is_dark)[name] in text
    assert svg(plot_of("run <a>", series())) == text


def test_a_terminal_gets_lines_of_its_width():
    plot = plot_of("run", series(reward=[-0.5, 0, 0.5, 2]))
    lines = ["".join(text for text, _ in line) for line in terminal(plot, 60, 10)]
    assert len(lines) == 12 and {len(line) for line in lines[:-1]} == {59 + 1}
    assert lines[0].lstrip().startswith("2 │") and lines[9].lstrip().startswith("-0.5 │")
    assert lines[-1].split() == ["1", "4"]
    used = {curve for line in terminal(plot, 60, 10) for _, curve in line}
    assert used == {None, 0, 1}


@pytest.mark.parametrize(
    "fields", [{"x": [5], "reward": [1.0], "pass_rate": [1]}, {"x": [], "reward": [], "pass_rate": []}]
)
def test_few_points_are_drawn_too(fields: dict[str, Any]):
    for by in ("time", "version"):
        plot = plot_of("run", series(by=by, **fields))
        ElementTree.fromstring(svg(plot))
        assert len(terminal(plot, 40)) == 14
        assert plot.is_empty == (not fields["x"])


def test_a_reply_of_another_shape_is_refused():
    with pytest.raises(ValueError, match="pass_rate has 1 values at 4 places"):
        plot_of("run", series(pass_rate=[1]))


def test_ticks_are_round_numbers():
    assert ticks(0, 1) == [0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert ticks(-1, 1.3) == [-1, -0.5, 0, 0.5, 1.0]
    assert ticks(3, 3) == [3]
