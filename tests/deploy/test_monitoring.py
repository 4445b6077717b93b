"""The Grafana dashboard and the Prometheus alerts: their PromQL parses, and uses metrics and labels that exist."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

ROOT = Path(__file__).parents[2]
BOARD = json.loads((ROOT / "deploy" / "grafana" / "rollyard.json").read_text())
RULES = [
    rule
    for group in yaml.safe_load((ROOT / "deploy" / "prometheus" / "rules.yml").read_text())["groups"]
    for rule in group["rules"]
]
ROW = re.compile(r"^\| `(\w+)` \| (\w+) \| (.*?) \|", re.MULTILINE)


def series() -> dict[str, set[str]]:
    """Labels of each time series, from the reference page, which tests/observe compares with the code."""
    found: dict[str, set[str]] = {"up": {"job", "instance"}}
    for name, kind, labels in ROW.findall((ROOT / "docs" / "reference" / "metrics.md").read_text()):
        own = {"job", "instance", *re.findall(r"`(\w+)`", labels)}
        if kind == "histogram":
            found |= {f"{name}_bucket": {*own, "le"}, f"{name}_sum": own, f"{name}_count": own}
        else:
            found[name] = own
    return found


SERIES = series()


def queries() -> list[tuple[str, str]]:
    """Where each expression is, and the expression, with Grafana's variables replaced."""
    panels = [(panel["title"], target["expr"]) for panel in BOARD["panels"] for target in panel.get("targets", ())]
    values = {"$__rate_interval": "1m", "$instance": ".*"}
    return [
        *((f"panel {title}", re.sub(r"\$\w+", lambda match: values[match[0]], text)) for title, text in panels),
        *((f"alert {rule['alert']}", rule["expr"]) for rule in RULES),
    ]


def parts(node: Any) -> Iterator[Any]:
    """An expression and everything below it."""
    yield node
    for name in ("expr", "lhs", "rhs", "vector_selector", "vs"):
        if (below := getattr(node, name, None)) is not None:
            yield from parts(below)
    for below in getattr(node, "args", None) or ():
        yield from parts(below)


@pytest.mark.parametrize(
    ("where", "text"), queries(), ids=lambda value: value if value[:5] in ("panel", "alert") else ""
)
def test_queries_use_metrics_and_labels_that_exist(where: str, text: str):
    nodes = list(parts(promql_parser.parse(text)))
    selectors = [node for node in nodes if isinstance(node, promql_parser.VectorSelector)]
    assert selectors, where
    carried: set[str] = set()
    for selector in selectors:
        name = selector.name or ""
        assert name in SERIES, f"{where}: there is no metric {name}"
        used = {matcher.name for matcher in selector.matchers.matchers} - {"__name__"}
        assert used <= SERIES[name], f"{where}: {name} has no label {used - SERIES[name]}"
        carried |= SERIES[name]
    for node in nodes:
        if isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
            assert set(node.modifier.labels) <= carried, f"{where}: {set(node.modifier.labels) - carried}"
    counters = {selector.name for selector in selectors if (selector.name or "").endswith(("_total", "_bucket"))}
    rated = {node.vector_selector.name for node in nodes if isinstance(node, promql_parser.MatrixSelector)}
    assert counters == rated, f"{where}: counters are used as rates, and only they"


def test_a_wrong_query_is_found():
    with pytest.raises(ValueError):
        promql_parser.parse("sum by (stage (rollyard_pool_active)")
    assert "rollyard_pool_busy" not in SERIES and "rollyard_stage_seconds_bucket" in SERIES


def test_most_metrics_are_on_the_dashboard():
    shown = " ".join(text for where, text in queries() if where.startswith("panel"))
    names = {re.sub(r"_(bucket|sum|count)$", "", name) for name in SERIES} - {"up"}
    missing = {name for name in names if not re.search(rf"\b{name}(_bucket|_sum|_count)?\b", shown)}
    assert missing <= {  # details, for a query by hand
        *("rollyard_egress_connections_total", "rollyard_engine_calls_total", "rollyard_engine_in_flight"),
        *("rollyard_http_request_seconds", "rollyard_layers_total", "rollyard_lost_attempt_tokens"),
        *("rollyard_node_drained", "rollyard_node_wants", "rollyard_sandbox_starts_total"),
        "rollyard_store_commit_operations",
    }


def test_panels_do_not_overlap_and_legends_name_labels_of_the_query():
    taken: set[tuple[int, int]] = set()
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])
    for panel in BOARD["panels"]:
        place = panel["gridPos"]
        columns, lines = range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"])
        cells = {(x, y) for x in columns for y in lines}
        assert not cells & taken and max(x for x, _ in cells) < 24, panel["title"]
        taken |= cells
        for target in panel.get("targets", ()):
            for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
                assert re.search(rf"by \([^)]*\b{label}\b", target["expr"]), (panel["title"], label)


def test_alerts_have_what_their_texts_name():
    for rule in RULES:
        assert rule["labels"]["severity"] in ("page", "ticket") and set(rule["annotations"]) == {
            "summary",
            "description",
        }
        for label in re.findall(r"\$labels\.(\w+)", json.dumps(rule["annotations"])):
            assert re.search(rf"by \([^)]*\b{label}\b", rule["expr"]) or rule["expr"].startswith("up{"), rule["alert"]
