"""Plots: SVG files and lines for a terminal, in the dashboard's colours."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

import pytest

from rollyard.cli.commands.runs import Chart
from rollyard.exports.plot import LABELS, Plot, colours, plots_of, short, ticks
from rollyard.exports.plot_svg import WIDTH, svg
from rollyard.exports.plot_terminal import terminal

SVG = "{http://www.w3.org/2000/svg}"


def series(**fields: Any) -> dict[str, Any]:
    known = {"by": "version", "x": [1, 2, 3, 4], "reward": [0.1, None, 0.5, 0.9], "pass_rate": [0, 0, 0.25, 0.5]}
    return {**known, **fields}


def test_a_file_has_both_curves_with_gaps_in_the_colours_of_the_page():
    text = svg("run <a>", plots_of(series()))
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
    assert svg("run <a>", plots_of(series())) == text


FULL = {
    "response_tokens": [100, 20_000, 30, 4],
    "turns": [1, 2, 3, 4],
    "staleness": [None, 1, 0, 2],
    "count": [8, 8, 8, 8],
    "share": {"model": [0.5] * 4, "tool": [0.25] * 4, "waiting": [0.25] * 4, "other": [0] * 4},
    "failures": [
        {"code": "run_deadline", "blame": blame, "counts": [1, 0, 2, 0]} for blame in ("policy", "task", "infra")
    ],
    "group_counts": {"delivered": [0, 2, 1, 0], "complete": [0, 1, 0, 0], "filtered": [0, 1, 1, 0]},
    "group_tokens": {"delivered": [0, 20, 10, 0], "filtered": [0, 7, 9, 0], "void": [0, 1, 0, 0]},
}


def test_a_run_has_the_charts_of_its_page():
    plots = {plot.title: plot for plot in plots_of(series(**FULL))}
    assert [*plots] == [
        *("reward", "response length (tokens)", "turns", "staleness (versions)", "share of rollout time"),
        *("rollouts ended", "share of ended groups", "tokens thrown away", "failures"),
    ]
    groups = plots["share of ended groups"]
    assert groups.curves["kept"] == [None, 0.75, 0.5, None] and groups.curves["filtered"] == [None, 0.25, 0.5, None]
    assert plots["tokens thrown away"].curves == {
        "filtered": [0, 7, 9, 0],
        "failed": [0, 0, 0, 0],
        "cancelled, dropped or undone": [0, 1, 0, 0],
    }
    assert [*plots["failures"].curves] == ["run_deadline (policy)", "run_deadline (task)", "run_deadline (infra)"]
    assert (groups.low, groups.high, plots["turns"].high) == (0, 1, 4)
    assert [plot.title for plot in plots_of(series(**FULL), ["turns", "reward"])] == ["reward", "turns"]


def test_a_file_has_a_panel_for_each_chart():
    root = ElementTree.fromstring(svg("run <a>", plots_of(series(**FULL))))
    panels = [*root.iter(f"{SVG}g")]
    assert len(panels) == 9 and len({panel.attrib["transform"] for panel in panels}) == 9
    texts = {element.text for element in root.iter(f"{SVG}text")}
    assert {"run <a>", "response length (tokens)", "20k", "cancelled, dropped or undone"} <= texts
    assert "5000" in texts and int(root.attrib["width"]) == 2 * WIDTH + 12


def test_a_long_legend_continues_on_the_next_line():
    labels = [f"a rather long label {number}" for number in range(6)]
    root = ElementTree.fromstring(svg("t", [Plot("t", "version", [1, 2], {label: [0, 1] for label in labels})]))
    places = {text.text: (float(text.attrib["x"]), float(text.attrib["y"])) for text in root.iter(f"{SVG}text")}
    lines = sorted({places[label][1] for label in labels})
    assert len(lines) == 2 and all(places[label][0] < WIDTH - 150 for label in labels)
    grid = [path.attrib["d"] for path in root.iter(f"{SVG}path") if path.attrib["class"] == "line"]
    assert min(float(path.split()[1].split("H")[0]) for path in grid) > lines[-1]


def test_the_command_names_every_chart():
    assert [*Chart] == [*LABELS]


def test_numbers_on_an_axis_are_short():
    assert [short(value) for value in (0, 0.25, 3, 1234.5, 9999, 12_000, 3_500_000, -2e10)] == [
        *("0", "0.25", "3", "1234", "9999", "12k", "3.5M", "-20G"),
    ]


def test_a_terminal_gets_lines_of_its_width():
    (plot,) = plots_of(series(reward=[-0.5, 0, 0.5, 2]))
    lines = ["".join(text for text, _ in line) for line in terminal(plot, 60, 10)]
    assert len(lines) == 12 and {len(line) for line in lines[:-1]} == {59 + 1}
    assert lines[0].lstrip().startswith("2 │") and lines[9].lstrip().startswith("-0.5 │")
    assert lines[-1].split() == ["1", "4"]
    used = {curve for line in terminal(plot, 60, 10) for _, curve in line}
    assert used == {None, 0, 1}


def test_few_points_are_drawn_too():
    for by in ("time", "version"):
        (plot,) = plots_of(series(by=by, x=[5], reward=[1.0], pass_rate=[1]))
        ElementTree.fromstring(svg("run", [plot]))
        assert len(terminal(plot, 40)) == 14
        assert plots_of(series(by=by, x=[], reward=[], pass_rate=[])) == []


def test_a_reply_of_another_shape_is_refused():
    with pytest.raises(ValueError, match="pass rate has 1 values at 4 places"):
        plots_of(series(pass_rate=[1]))


def test_ticks_are_round_numbers():
    assert ticks(0, 1) == [0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert ticks(-1, 1.3) == [-1, -0.5, 0, 0.5, 1.0]
    assert ticks(3, 3) == [3]
