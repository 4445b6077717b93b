"""What yardwork's tasks are made of: words, columns, endings and variables, in two pools that share nothing.

Invariants, held by tests: no word is in both pools, none is part of another (a search for one never finds another),
and none is in a template's text. Numbers are in two pools as well: `is_held_out`. What is counted or summed up out of
them may coincide, and so may the small words that files are written in (`see`, `total`, `echo`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Split = Literal["train", "held_out"]
SPLITS: tuple[Split, ...] = ("train", "held_out")


@dataclass(frozen=True, slots=True)
class Pool:
    words: tuple[str, ...]  # names of files and folders, and what is in them
    columns: tuple[str, ...]  # of tables
    endings: tuple[str, ...]  # of plain files; tables are .csv and scripts .sh in both
    variables: tuple[str, ...]  # of scripts


def is_held_out(number: int) -> bool:
    """Every fifth number is never drawn for training."""
    return number % 5 == 3


_TRAIN = """
otter badger falcon heron lynx walrus beaver ferret gecko marmot osprey puffin raven salmon turtle weasel
zebra camel donkey panther maple willow cedar birch poplar juniper acacia aspen spruce hazel laurel linden
amber crimson indigo violet scarlet turquoise ivory khaki magenta bronze copper cobalt nickel silver pewter
marble granite basalt quartz slate canyon glacier harbor island lagoon meadow prairie valley volcano desert
jungle tundra geyser fjord plateau anchor barrel candle drum engine feather goblet hammer jacket kettle ladder
mirror needle oyster pillow quiver ribbon saddle teapot umbrella violin wagon blanket bucket carpet curtain
fiddle helmet igloo lantern magnet napkin orchid parrot rocket shovel trumpet velvet whistle zipper biscuit
butter cheese dumpling honey muffin noodle pancake pepper pretzel sugar syrup toffee waffle almond cashew
walnut pecan castle chapel cottage fortress palace temple tower village
"""

_HELD_OUT = """
apricot banana cherry mango papaya peach plum quince raisin tomato celery carrot cabbage garlic onion parsnip
radish spinach turnip pumpkin dolphin giraffe hamster iguana jackal koala lemur monkey narwhal ostrich pelican
quail rabbit sparrow toucan urchin vulture wombat zebu antelope bison cheetah comet galaxy meteor nebula orbit
planet pulsar quasar saturn sunspot asteroid eclipse banjo cello flute guitar harp piano tuba cymbal bugle
clarinet oboe dagger shield lance sabre cannon musket armour crossbow linen cotton denim satin silk wool tweed
flannel corduroy leather cloud thunder drizzle blizzard breeze tornado monsoon rainbow sailor pirate doctor
farmer baker tailor miller mason glazier weaver butcher barber bridge tunnel ferry tram airship bicycle
scooter tractor canoe kayak raft sledge zeppelin opal topaz emerald sapphire diamond garnet jasper onyx zircon
"""

POOLS: dict[Split, Pool] = {
    "train": Pool(
        tuple(_TRAIN.split()),
        ("city", "colour", "fruit", "job", "pet", "season"),
        ("txt", "log", "md"),
        ("PRICE", "LIMIT", "RATE", "SPEED"),
    ),
    "held_out": Pool(
        tuple(_HELD_OUT.split()),
        ("town", "metal", "sport", "dish", "plant", "month"),
        ("dat", "lst", "cfg"),
        ("DEPTH", "WIDTH", "QUOTA", "WEIGHT"),
    ),
}
