"""Teaches a small model yardwork, through Rollyard's public API alone: a warm start on demonstrations, then RL.

    python examples/yardwork/alone.py --model smollm2 -- --out runs/one             # engine, service and trainer here
    python examples/yardwork/train.py --model FOLDER --engine URL --out runs/one    # with those that you have started

1. Warm start. The agent `demonstrate` leaves token-exact traces of the tasks' own solutions. A LoRA adapter is trained
   on them until pass@1 on a validation part of the held-out split has stopped rising; the best epoch stays.
2. RL. A draw hands out groups whose rewards differ (DAPO's dynamic sampling), advantages are GRPO's, the loss is a mean
   over tokens, each token's weight is its importance ratio, cut off at `--cap`, and a token that has come as far as
   `--clip` is left alone. While a batch is learned from, `--rounds` times, the next one is being sampled by the weights
   before (`--max-staleness 1`); 0 takes turns instead, `pace` says how. What is nearly always solved is in few of such
   groups, and wrong uses of its words elsewhere unteach it: so some demonstrations are learned along (`--anchor`).

Everything is in `--out`. Cut it anywhere, run it again, and it goes on from the last checkpoint: what is random depends
on the seed and the step alone, and the draw is told which batches the checkpoint knows. `--minutes 8` cuts it.

With `-` at the end, one process runs several trainings, one after another: each line of stdin has the options of one,
in addition to those of the command line.
"""

from __future__ import annotations

import argparse
import gc
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

OVER = "this training is over"
"""What the process says after each of several trainings."""


def main() -> None:
    given = sys.argv[1:]
    if given[-1:] != ["-"]:
        train(given)
        return
    for line in sys.stdin:
        train([*given[:-1], *shlex.split(line)])
        gc.collect()  # its model, before the next one is loaded
        print(OVER, flush=True)


def train(given: Sequence[str]) -> None:
    args = options(given)  # wrong ones are refused before torch is imported, which takes seconds

    gc.disable()  # while hundreds of thousands of objects are made, none of them garbage
    from training import run

    gc.enable()
    run(args)


def options(given: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", required=True, help="the folder of the model that the engine serves")
    add("--engine", required=True, help="the URL of `rollyard engine`: it is told the folder of each new adapter")
    add("--service", help="the URL of `rollyard serve`; else $ROLLYARD_URL")
    add("--token", help="its token; else $ROLLYARD_TOKEN")
    add("--out", type=Path, required=True, help="checkpoints and metrics; the same again goes on from there")
    add("--seed", type=int, default=0)
    add("--device", help="by default cuda where there is one, else cpu")
    add("--bf16", action="store_true", help="compute in bfloat16, if the device can; weights stay float32")
    add("--levels", default="1-2", help="of the tasks, in training and in testing")
    add("--families", default="all")
    add("--start", type=Path, help="an adapter to begin RL with, instead of a warm start, and without demonstrations")
    add("--rank", type=int, default=8)
    add("--micro-tokens", type=int, default=32768, help="in one forward pass")
    add("--demonstrations", type=int, default=512)
    add("--warm-lr", type=float, default=1e-3)
    add("--warm-batch", type=int, default=16)
    add("--passes", type=int, default=2, help="over the demonstrations, in an epoch")
    add("--patience", type=int, default=2, help="epochs without a better pass@1, after which the warm start ends")
    add("--max-epochs", type=int, default=12)
    add("--more-warm-s", type=float, default=0, help="no RL: so many seconds more of warm start on the device instead")
    add("--steps", type=int, default=60, help="of RL: batches, and versions of the weights")
    add("--want", type=int, default=32, help="groups in a batch")
    add("--group-size", type=int, default=8)
    add("--minibatches", type=int, default=2, help="optimizer steps for each round of a batch")
    add("--rounds", type=int, default=2, help="how often a batch is learned from: sampling is what takes the time")
    add("--lr", type=float, default=3e-4)
    add("--rise", type=int, default=5, help="steps over which it rises: Adam's first ones go as far for noise")
    add("--fall", type=float, default=0.1, help="what is left of it at the last step: noise is forgotten on the way")
    add("--cap", type=float, default=2.0, help="of importance weights")
    add("--clip", type=float, nargs=2, default=(0.2, 0.28), help="a token's ratio is driven no further down, or up")
    add("--anchor", type=float, default=0.125, help="demonstrations learned again for each rollout: one for eight")
    add("--max-staleness", type=int, default=1, help="0: sampling and learning take turns")
    add("--oversample", action="store_true", help="where they take turns: begin more than a batch needs (see `pace`)")
    add("--tool-latency-s", type=float, default=0.0, help="each tool call takes so much longer (to measure)")
    add("--keep", default="spread", help="which groups are handed out: spread, or all")
    add("--max-turns", type=int, default=8)
    add("--validate-tasks", type=int, default=128)
    add("--test-tasks", type=int, default=512)
    add("--validate-every", type=int, default=10)
    add("--save-every", type=int, default=5)
    add("--minutes", type=float, help="save, and end, after so many")
    add("--tensorboard", action="store_true")
    add("--wandb", metavar="PROJECT")
    args = parser.parse_args(given)
    if args.oversample and args.max_staleness:
        parser.error("--oversample: that is for --max-staleness 0, where sampling and learning take turns")
    return args


if __name__ == "__main__":
    main()
