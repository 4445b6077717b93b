"""The order of tasks: determined by the seed, each task once per epoch, returned tasks first."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from rollyard.core.draw import DrawConfig, DrawItem, DrawProgress, SourceKind, SourceSpec
from rollyard.sampling.task_order import TaskOrder


def config(size: int | None, *, epochs: int | None = None, shuffle: bool = True, seed: int = 0) -> DrawConfig:
    kind = SourceKind.PUSH if size is None else SourceKind.TASKS
    return DrawConfig(SourceSpec(kind, size=size), epochs=epochs, shuffle=shuffle, seed=seed)


def taken(order: TaskOrder, progress: DrawProgress, most: int) -> list[DrawItem]:
    items: list[DrawItem] = []
    while len(items) < most and order.has_more(progress):
        items.append(order.take(progress))
    return items


@given(size=st.integers(1, 50), epochs=st.integers(1, 4), shuffle=st.booleans(), seed=st.integers(0, 99))
def test_every_epoch_has_each_task_once(size: int, epochs: int, shuffle: bool, seed: int):
    order, progress = TaskOrder(config(size, epochs=epochs, shuffle=shuffle, seed=seed), size), DrawProgress()
    items = taken(order, progress, size * epochs + 1)
    assert len(items) == size * epochs and order.is_dry(progress)
    for epoch in range(epochs):
        of_it = [item.index for item in items[epoch * size : (epoch + 1) * size]]
        assert sorted(of_it) == list(range(size)) and (shuffle or of_it == list(range(size)))
        assert all(item.epoch == epoch for item in items[epoch * size : (epoch + 1) * size])


@given(at=st.integers(0, 150), seed=st.integers(0, 9))
def test_two_numbers_are_enough_to_continue_after_a_restart(at: int, seed: int):
    draw_config = config(50, seed=seed)
    whole = taken(TaskOrder(draw_config, 50), DrawProgress(), 200)
    progress = DrawProgress()
    taken(TaskOrder(draw_config, 50), progress, at)
    restarted = DrawProgress(epoch=progress.epoch, position=progress.position)
    assert taken(TaskOrder(draw_config, 50), restarted, 200 - at) == whole[at:]


def test_epochs_and_seeds_are_shuffled_differently():
    items = taken(TaskOrder(config(50), 50), DrawProgress(), 100)
    first, second = ([item.index for item in items[begin : begin + 50]] for begin in (0, 50))
    other = [item.index for item in taken(TaskOrder(config(50, seed=1), 50), DrawProgress(), 50)]
    assert first != second and first != other and first != sorted(first)


def test_without_a_bound_on_epochs_the_order_never_ends():
    order, progress = TaskOrder(config(3), 3), DrawProgress()
    assert len(taken(order, progress, 1000)) == 1000 and progress.epoch == 333 and not order.is_dry(progress)


def test_returned_tasks_come_first_and_an_exhausted_source_has_them():
    order, progress = TaskOrder(config(2, epochs=1), 2), DrawProgress()
    first, _ = taken(order, progress, 9)
    assert order.is_dry(progress)
    progress.returned.append(replace(first, tries=1, turn=1))
    assert not order.is_dry(progress)
    assert order.take(progress) == replace(first, tries=1, turn=1)
    assert order.is_dry(progress)


def test_a_growing_source_is_taken_in_order_and_once():
    order, progress = TaskOrder(config(None, epochs=5), None, grown=2), DrawProgress()
    assert [item.index for item in taken(order, progress, 9)] == [0, 1]
    assert not order.has_more(progress) and not order.is_dry(progress), "more may be pushed"
    order.grown = 4
    assert [item.index for item in taken(order, progress, 9)] == [2, 3]
    progress.is_source_closed = True
    assert order.is_dry(progress)


def test_an_empty_source_has_nothing():
    assert TaskOrder(config(0), 0).is_dry(DrawProgress())
