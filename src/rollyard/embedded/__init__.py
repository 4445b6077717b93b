"""The embedded engine: a causal language model served in this process, by the part of vLLM's API that Rollyard uses.

It is for laptops, tests, small models and trainers that sample and train on the same device, and correct before fast. A
cluster wants vLLM or SGLang. What speaks to it is `rollyard.engines.VllmEngine`, unchanged, and it passes the same
conformance suite.

    model.py      a transformers model, run over sequences of different lengths at once, sharing a trainer's weights
    llama.py      a model of Llama's kind on a CPU, computed here without transformers
    checkpoint.py such a model's folder: its shape, and its weights by name
    linears.py    products with weights in the layout of the CPU's kernels
    stacked.py    the keys and values of a sequence in one tensor, for llama.py
    loading.py    a model and its tokenizer, without transformers where possible
    attention.py  the keys and values of each sequence, and attention over them, as a CPU wants it
    paged.py      the same in blocks of one pool, in padded batches, as a GPU wants it
    graphs.py     what a GPU is told, recorded and played again
    bursts.py     several tokens for each sequence before anybody looks at one
    kernels.py    a single token's attention over those blocks, and rotary embeddings, as Triton kernels
    fusing.py     one kernel in the place of several of transformers'
    adapters.py   LoRA adapters, added to the weights
    sampling.py   temperature, top_k, top_p, seeds, and the exact logprobs of what was sampled from
    batching.py   which sequences go into a step: joining, leaving, chunks of prompts, memory
    prefixes.py   what ended sequences leave for the next turn of their session
    worker.py     the one thread that runs the model
    calls.py      one request as the event loop sees it, and the bodies of its answers
    desk.py       which calls there are, between the event loop and that thread
    requests.py   the bodies of requests, read strictly
    texts.py      chat templates and plain text
    server.py     the routes, and an engine's life
    weights.py    models by a short name: fetched once, checked, kept
    sources.py    where they come from: a package index, the Hugging Face hub
    convert.py    a GGUF file made into an ordinary model's folder
    gguf.py       what is in such a file

Importing this wing needs none of the packages of the extra `rollyard[local]`; running a model does.
"""

from __future__ import annotations

from importlib.util import find_spec

NEEDED = ("torch", "transformers")


def missing_packages() -> tuple[str, ...]:
    """Which packages of `rollyard[local]` are not installed."""
    return tuple(name for name in NEEDED if find_spec(name) is None)
