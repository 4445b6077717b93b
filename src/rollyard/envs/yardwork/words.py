"""The vocabulary of yardwork's tasks: words, columns, endings and variables, in two disjoint pools.

Invariants, checked by tests: no word is in both pools, no word is part of another (a search for one never finds
another), and no word is in a template's text. Numbers are in two pools as well (`is_held_out`). Counts and sums may
coincide between splits, and so may the small words in files (`see`, `total`, `echo`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Split = Literal["train", "held_out"]
SPLITS: tuple[Split, ...] = ("train", "held_out")


@dataclass(frozen=True, slots=True)
class WordPool:
    words: tuple[str, ...]  # names and contents of files and folders
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
acrobat admiral alcove alpaca anvil apron arcade armadillo artichoke atlas attic avalanche axle bagpipe
balcony bamboo bandit banner basket bathtub beacon bedrock beetle belfry bellows bishop blackbird bobsled
bonfire bonnet bookcase boulder bouquet bracelet brass brewery brick bronco broom buffalo bulldozer bumblebee
bungalow bunker buzzard cabin cactus calendar canary caravan cardinal caribou cavern cellar centaur chariot
chestnut chimney chipmunk cider cinnamon citadel cobbler cobra coconut compass condor corridor cougar coyote
cradle crayon cricket crocodile crumpet cucumber cupboard cutlery cypress daffodil daisy dalmatian dandelion
dervish dinghy domino dragon dungeon dynamo eagle eggplant elephant elevator envelope espresso falafel fennel
fern firefly flamingo fountain foxglove freighter furnace gallery gargoyle gazelle gazette ginger gondola
goose gorilla grape greyhound griffin guardian gypsum halibut hammock harness harvest hedgehog hermit hickory
hinge hornet hourglass hyacinth iceberg impala inkwell ironclad jaguar jasmine javelin jellyfish jigsaw
jukebox kangaroo kestrel keyhole kingdom knapsack kumquat labyrinth lacquer lavender lemonade leopard lettuce
lilac limestone lobster locket locust lollipop lumber macaroni mackerel magnolia mahogany mallard mandolin
mansion marigold marzipan meerkat mermaid minaret moonstone mosaic mosquito muskrat mustard narcissus
nectarine nutmeg oasis oatmeal octopus olive omelette orangutan orchestra oxbow paddock pagoda pamphlet
papyrus parachute parsley partridge pavilion peacock pebble pelham pendulum penguin peony periscope petunia
pheasant pickaxe pigeon pilgrim pinwheel pistachio plankton platypus pomelo poodle popcorn porcupine portrait
potato primrose prism puzzle pyramid python raccoon raspberry ravine reindeer rhubarb riddle rosemary rudder
saffron sandal sandstone sardine satchel saxophone scallop scorpion seagull sequoia sherbet sickle skylark
snowflake sombrero spaniel spatula sphinx sponge squirrel stallion starfish stencil sundial sunflower swallow
sycamore tangerine tapestry tarantula telescope termite terrace thimble thistle tiger toboggan tortoise
tugboat tulip tunic turbine turban unicorn vanilla vineyard wafer warbler warehouse wasp wharf windmill
wisteria wolverine wreath yacht yogurt zucchini
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

POOLS: dict[Split, WordPool] = {
    "train": WordPool(
        tuple(_TRAIN.split()),
        ("city", "colour", "fruit", "job", "pet", "season", "country", "drink", "hobby", "language", "river", "craft"),
        ("txt", "log", "md", "bak", "tmp", "rst", "org", "conf", "ini", "tex", "asc", "doc"),
        ("PRICE", "LIMIT", "RATE", "SPEED", "COUNT", "SIZE", "HEIGHT", "SCORE", "TIMEOUT", "LEVEL", "OFFSET", "PERIOD"),
    ),
    "held_out": WordPool(
        tuple(_HELD_OUT.split()),
        ("town", "metal", "sport", "dish", "plant", "month"),
        ("dat", "lst", "cfg"),
        ("DEPTH", "WIDTH", "QUOTA", "WEIGHT"),
    ),
}
