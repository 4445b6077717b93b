"""The `yardwork` environment: small shell tasks generated from a seed, with exact checks and an oracle."""

from rollyard.envs.yardwork.environment import YardworkEnvironment
from rollyard.envs.yardwork.families import FAMILIES, demonstration, make
from rollyard.envs.yardwork.puzzle import Puzzle, SolutionTurn

__all__ = ["FAMILIES", "Puzzle", "SolutionTurn", "YardworkEnvironment", "demonstration", "make"]
