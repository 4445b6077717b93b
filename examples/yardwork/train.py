"""Trains a small model on yardwork, using only Rollyard's public API: a warm start on demonstrations, then RL.

    python examples/yardwork/alone.py --model smollm2 -- --out runs/one             # engine, service and trainer here
    python examples/yardwork/train.py --model FOLDER --engine URL --out runs/one    # with running ones

1. Warm start. The agent `demonstrate` produces token-exact traces of the tasks' own solutions. A LoRA adapter is
   trained on them until pass@1 on a validation part of the held-out split stops rising; the best epoch is kept.
2. RL. A draw delivers groups whose rewards differ (DAPO's dynamic sampling). Advantages are GRPO's. The loss is a mean
   over tokens; each token's weight is its importance ratio, capped at `--cap`, and a token whose ratio has reached
   `--clip` is skipped. While the trainer learns from a batch, `--rounds` times, the next one is sampled with the
   previous weights (`--max-staleness 1`); with 0, sampling and learning alternate (see `pace`). Tasks that are nearly
   always solved are in few such groups, and the model unlearns them from wrong uses of their words in other tasks; so
   each step also learns from some demonstrations (`--anchor`).

All state is in `--out`. Interrupt it at any time and run it again: it continues from the last checkpoint. Randomness
depends only on the seed and the step, and the draw is rewound to the checkpoint's batch. `--minutes 8` ends it early.

With `-` at the end, one process runs several trainings, one after another: each line of stdin contains the options of
one training, in addition to those of the command line.
"""

from __future__ import annotations

import argparse
import gc
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

OVER = "this training is over"
"""What the process prints after each of several trainings."""


def main() -> None:
    argv = sys.argv[1:]
    if argv[-1:] != ["-"]:
        train(argv)
        return
    for line in sys.stdin:
        train([*argv[:-1], *shlex.split(line)])
        gc.collect()  # frees its model before the next one is loaded
        print(OVER, flush=True)


def train(argv: Sequence[str]) -> None:
    args = options(argv)  # refuses wrong options before torch is imported, which takes seconds

    gc.disable()  # the imports create hundreds of thousands of objects, and no garbage
    from training import run

    gc.enable()
    run(args)


def options(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", required=True, help="the folder of the model that the engine serves")
    add("--engine", required=True, help="the URL of `rollyard engine`, which loads each new adapter")
    add("--service", help="the URL of `rollyard serve`; default $ROLLYARD_URL")
    add("--token", help="its token; default $ROLLYARD_TOKEN")
    add("--out", type=Path, required=True, help="checkpoints and metrics; an existing folder is continued")
    add("--seed", type=int, default=0)
    add("--device", help="default: cuda if available, else cpu")
    add("--bf16", action="store_true", help="compute in bfloat16, if the device supports it; weights stay float32")
    add("--levels", default="1-2", help="levels of the tasks, in training and in testing")
    add("--families", default="all")
    add("--start", type=Path, help="start RL with this adapter, without a warm start and without demonstrations")
    add("--rank", type=int, default=8)
    add("--micro-tokens", type=int, default=32768, help="tokens per forward pass")
    add("--demonstrations", type=int, default=512)
    add("--warm-lr", type=float, default=1e-3)
    add("--warm-batch", type=int, default=16)
    add("--passes", type=int, default=2, help="passes over the demonstrations per epoch")
    add("--patience", type=int, default=2, help="end the warm start after so many epochs without a better pass@1")
    add("--max-epochs", type=int, default=12)
    add("--more-warm-s", type=float, default=0, help="instead of RL, continue the warm start for so many seconds")
    add("--steps", type=int, default=60, help="steps of RL: each is one batch and one weight version")
    add("--want", type=int, default=32, help="groups per batch")
    add("--group-size", type=int, default=8)
    add("--minibatches", type=int, default=2, help="optimizer steps per round of a batch")
    add("--rounds", type=int, default=2, help="how often to learn from a batch: sampling takes most of the time")
    add("--lr", type=float, default=3e-4)
    add("--rise", type=int, default=5, help="warm-up steps of --lr: Adam's first steps are large even for noise")
    add("--fall", type=float, default=0.1, help="share of --lr at the last step: the decay averages out noise")
    add("--cap", type=float, default=2.0, help="upper limit of importance weights")
    add("--clip", type=float, nargs=2, default=(0.2, 0.28), help="how far a token's ratio may move down and up")
    add("--anchor", type=float, default=0.125, help="demonstrations to learn from per rollout; 0.125 is one for eight")
    add("--max-staleness", type=int, default=1, help="0: sampling and learning alternate")
    add("--oversample", action="store_true", help="if they alternate: start more than a batch needs (see `pace`)")
    add("--tool-latency-s", type=float, default=0.0, help="delay each tool call (for measurements)")
    add("--keep", default="spread", help="which groups the draw delivers: spread or all")
    add("--max-turns", type=int, default=8)
    add("--validate-tasks", type=int, default=128)
    add("--test-tasks", type=int, default=512)
    add("--validate-every", type=int, default=10)
    add("--save-every", type=int, default=5)
    add("--minutes", type=float, help="save and end after so many minutes")
    add("--tensorboard", action="store_true")
    add("--wandb", metavar="PROJECT")
    args = parser.parse_args(argv)
    if args.oversample and args.max_staleness:
        parser.error("--oversample needs --max-staleness 0, with which sampling and learning alternate")
    return args


if __name__ == "__main__":
    main()
