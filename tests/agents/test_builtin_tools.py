import pytest

from rollyard.core.failure import UnknownTool
from rollyard.tools import ToolContext, tool_kind


async def test_finish_ends_with_the_answer_and_needs_no_sandbox():
    kind = tool_kind("finish")
    assert not kind.needs_sandbox
    tool = await kind.open(ToolContext(None))
    result = await tool.call({"answer": "42"}, timeout_s=1)
    assert result.is_final
    assert result.info == {"answer": "42"}
    assert (await tool.call({}, timeout_s=1)).info == {}
    await tool.close()


def test_an_unknown_tool_is_named_with_the_choices():
    with pytest.raises(UnknownTool, match=r"'hammer'; there are: .*finish, .*shell"):
        tool_kind("hammer")
