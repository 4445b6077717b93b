"""Which node gets a rollout: the emptiest, unless another has what it needs and is not much fuller."""

from hypothesis import given
from hypothesis import strategies as st

from rollyard.core import Rollout, SandboxOptions, Task
from rollyard.fleet.placement import REMEMBERED, SETUP_WORTH, NodeRoom, PlacementKeys, place

NEEDS = PlacementKeys("setup", "image")


def room(places: int, want: int, *needs: PlacementKeys) -> NodeRoom:
    node_room = NodeRoom(places, want)
    for one in needs:
        node_room.remember(one)
    return node_room


def test_the_emptiest_node_is_chosen() -> None:
    full, half, empty = room(8, 1), room(8, 4), room(8, 8)
    assert place(NEEDS, [full, half, empty]) is empty
    assert place(NEEDS, [room(100, 40), room(10, 5)]) is not None
    small, large = room(10, 5), room(100, 40)
    assert place(NEEDS, [large, small]) is small, "by the share of its places, not by their number"


def test_a_node_that_wants_none_gets_none() -> None:
    assert place(NEEDS, []) is None
    assert place(NEEDS, [room(8, 0, NEEDS)]) is None
    with_room = room(8, 1)
    assert place(NEEDS, [room(8, 0, NEEDS), with_room]) is with_room


def test_a_node_with_the_set_up_may_be_somewhat_fuller() -> None:
    places = 100
    worth = int(SETUP_WORTH * places)
    empty = room(places, 50)
    prepared = room(places, 50 - worth + 1, PlacementKeys("setup", None))
    assert place(PlacementKeys("setup", None), [empty, prepared]) is prepared
    prepared.want = 50 - worth - 1
    assert place(PlacementKeys("setup", None), [empty, prepared]) is empty


def test_an_image_counts_less_than_a_set_up() -> None:
    same_image, same_setup = room(10, 5, PlacementKeys("other", "image")), room(10, 5, PlacementKeys("setup", None))
    assert place(NEEDS, [same_image, same_setup]) is same_setup
    assert place(NEEDS, [same_image, room(10, 5)]) is same_image
    assert place(NEEDS, [same_image, room(10, 7)]) is not same_image


def test_remembered_keys_are_bounded_and_the_oldest_is_dropped() -> None:
    node_room = room(8, 8)
    for number in range(REMEMBERED):
        node_room.remember(PlacementKeys(str(number), f"image {number}"))
    node_room.remember(PlacementKeys("0", "image 0"))  # used again
    node_room.remember(PlacementKeys("new", "new image"))
    assert len(node_room.setups) == len(node_room.images) == REMEMBERED
    assert "0" in node_room.setups and "1" not in node_room.setups
    assert "image 0" in node_room.images and "image 1" not in node_room.images


def test_rollouts_of_one_task_have_the_same_placement_keys() -> None:
    task = Task("shell", {"setup": ["make"]})
    assert PlacementKeys.of(Rollout("a", "run", task)) == PlacementKeys.of(Rollout("b", "other", task))
    for other in (
        Task("math", {"setup": ["make"]}),
        Task("shell", {"setup": ["make all"]}),
        Task("shell", {"setup": ["make"]}, sandbox=SandboxOptions(image="debian")),
    ):
        assert PlacementKeys.of(Rollout("a", "run", other)).setup != PlacementKeys.of(Rollout("a", "run", task)).setup
    assert (
        PlacementKeys.of(Rollout("a", "run", Task("shell", sandbox=SandboxOptions(image="debian")))).image == "debian"
    )


@given(
    free_counts=st.lists(st.integers(0, 6), min_size=1, max_size=5), tasks=st.lists(st.sampled_from("abc"), max_size=40)
)
def test_no_node_gets_more_than_it_wants_and_no_rollout_waits_while_one_wants_more(
    free_counts: list[int], tasks: list[str]
) -> None:
    rooms = [NodeRoom(8, free_count) for free_count in free_counts]
    placed = 0
    for task in tasks:
        needs = PlacementKeys(task, None)
        chosen = place(needs, rooms)
        if chosen is None:
            break
        chosen.want -= 1
        chosen.remember(needs)
        placed += 1
    assert min(one.want for one in rooms) >= 0
    assert placed == min(len(tasks), sum(free_counts))
