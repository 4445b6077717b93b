# pyright: reportMissingImports=false
"""Runs `generate` of transformers in a separate process, for `rollyard bench engine`.

It takes the model options of `rollyard engine` and prints one line when it is ready. Then each line of stdin is
{"prompts", "tokens", "has_logprobs"}, answered with the sampled ids, or {"ids", "start"}, answered with the logprobs of
the ids from that place on. The model is loaded by the engine's own
rules, so that device, dtype and weights are the same; everything else is the default of transformers.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--model", "--device", "--dtype"):
        parser.add_argument(name, required=True)
    options = parser.parse_args()
    os.environ.setdefault("ONEDNN_JIT_PROFILE", "0")  # as `rollyard engine` does

    import torch

    from rollyard.embedded.transformer.model import choose_device, choose_dtype, load_module

    device = choose_device(options.device)
    model = load_module(options.model, device=device, dtype=choose_dtype(options.dtype, device)).eval()
    dtype = str(model.dtype).removeprefix("torch.")
    about = {"device": device, "dtype": dtype, "threads": torch.get_num_threads(), "torch": torch.__version__}
    _print_json(about | ({"gpu": torch.cuda.get_device_name(device)} if device.startswith("cuda") else {}))
    for line in sys.stdin:
        order = json.loads(line)
        if "ids" in order:
            _print_json({"logprobs": _logprobs(model, **order)})
        else:
            _print_json({"token_ids": _answer(model, **order)})


def _answer(model: Any, prompts: list[list[int]], tokens: int, has_logprobs: bool) -> list[list[int]]:
    """Samples tokens and their logprobs as a user of transformers would."""
    import torch

    ids = torch.tensor(prompts, device=model.device)
    # the model's own defaults may use top_k or top_p: sample from the whole distribution, as the engine does
    generated = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=has_logprobs,
    )
    if has_logprobs:
        scores = model.compute_transition_scores(generated.sequences, generated.logits, normalize_logits=True)
        logprobs = scores.tolist()
        if len(logprobs) != len(prompts) or any(len(row) != tokens for row in logprobs):
            raise RuntimeError(f"generate returned {len(logprobs)} rows of logprobs, not {len(prompts)} of {tokens}")
    return generated.sequences[:, ids.shape[1] :].tolist()


def _logprobs(model: Any, ids: list[int], start: int) -> list[float]:
    import torch

    with torch.inference_mode():
        logits = model(torch.tensor([ids], device=model.device)).logits[0].float().log_softmax(-1)
    return [float(logits[place - 1, ids[place]]) for place in range(start, len(ids))]


def _print_json(value: object) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
