"""axe-core finds no serious or critical violation in any view, in light and dark mode."""

from __future__ import annotations

from typing import Any

import pytest

from tests.service.site import Site
from tests.web.conftest import NewVisitor
from tests.web.visitor import Theme, Visitor
from tests.web.world import ADDRESSES, FAILED, RUNNING

PATHS = (*ADDRESSES.values(), f"/rollouts/default/{FAILED}", f"/rollouts/default/{RUNNING}", "/nothing")

AUDIT = """async (rules) => {
  const options = { resultTypes: ["violations"], ...(rules ? { runOnly: { type: "rule", values: rules } } : {}) };
  const { violations } = await axe.run(document, options);
  return violations.filter((one) => ["serious", "critical"].includes(one.impact)).map((one) => ({
    id: one.id, help: one.help,
    nodes: one.nodes.slice(0, 3).map((node) => `${node.target} ${node.html.slice(0, 160)} ${node.failureSummary}`),
  }));
}"""


async def violations(visitor: Visitor, rules: list[str] | None) -> list[dict[str, Any]]:
    return await visitor.page.evaluate(AUDIT, rules)


@pytest.mark.parametrize("theme", ["light", "dark"])
async def test_no_view_has_a_serious_violation(world: Site, new_visitor: NewVisitor, axe: str, theme: Theme) -> None:
    """Of the rules, only that of contrast depends on the theme."""
    rules = None if theme == "light" else ["color-contrast"]
    visitor = await new_visitor(world, theme=theme)
    visitor.expect_status(401)
    await visitor.context.add_init_script(axe)
    await visitor.page.goto(world.url)
    await visitor.settled()
    found = {"sign in": await violations(visitor, rules)}
    await visitor.open("/")
    for path in PATHS:
        await visitor.go(path)
        found[path] = await violations(visitor, rules)
    assert {path: those for path, those in found.items() if those} == {}
