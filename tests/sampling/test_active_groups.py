"""Which rollouts a draw counts: those that it has started, not those that only name its groups."""

from dataclasses import replace

from rollyard.core import Draw, Ending, Group, GroupState, Outcome, Rollout, Score, Task
from rollyard.core.rollout import Summary
from rollyard.sampling.active_groups import ActiveGroups, GroupChanges
from rollyard.sampling.draw_state import DrawState
from rollyard.sampling.filters import keep_of
from rollyard.sampling.open_group import OpenGroup
from rollyard.sampling.task_order import TaskOrder

from .driving import config_of


def ended(group: str, index: int, rollout_id: str = "") -> Rollout:
    summary = Summary(sampled_tokens=100)
    ending = Ending(Outcome.COMPLETED, Score(1.0), summary=summary)
    return Rollout(rollout_id or f"{group}-{index}", "r", Task("shell"), group=group, index=index, ending=ending)


def test_a_group_that_was_given_up_waits_for_its_own_rollouts_only():
    config = config_of(group_size=2)
    draw_state = DrawState(Draw("d", "r", config), TaskOrder(config, config.source.size))
    groups = ActiveGroups(draw_state, keep_of(config.keep))
    draw_state.ask(4)
    (one,) = draw_state.admit(1)
    groups.begin(OpenGroup(Group(one.id, "r", 2), Task("shell")), GroupChanges())
    changes = GroupChanges()
    groups.end(one, GroupState.CANCELLED, "closed", changes)
    assert changes.cancels == [f"{one.id}-0", f"{one.id}-1"]
    assert not groups.take(ended(one.id, 7)) and not groups.take(ended(one.id, 0, "stranger"))
    assert groups.is_at_work and draw_state.progress.figures.tokens_sampled == 0
    assert groups.take(ended(one.id, 0)) and not groups.take(ended(one.id, 0)) and groups.is_at_work
    assert groups.take(ended(one.id, 1)) and not groups.is_at_work
    assert draw_state.progress.figures.tokens_sampled == 200


def test_an_open_group_does_not_count_an_index_that_it_has_not_started():
    opened = OpenGroup(Group("g", "r", 2), Task("shell"))
    opened.begin(range(2))
    assert not opened.take(ended("g", 2)) and opened.take(ended("g", 1))
    opened.group = replace(opened.group, started=3)
    assert opened.take(ended("g", 2))
