"""The embedded engine: serves a causal language model in this process by the part of vLLM's API that Rollyard uses.

It is for laptops, tests, small models, and trainers that sample and train on the same device. It puts correctness
before speed; on a cluster use vLLM or SGLang. Its client is `rollyard.engines.VllmEngine`, unchanged, and it passes the
same conformance suite.

    transformer/
      model.py      a transformers model, run over sequences of different lengths at once, sharing a trainer's weights
      llama.py      Llama-like models on a CPU, without transformers
      linears.py    matrix products with weights in the layout of the CPU's kernels
      stacked.py    the keys and values of a sequence in one tensor, for llama.py
      attention.py  per-sequence key/value caches and attention over them, for CPUs
      paged.py      the same in blocks of one pool, in padded batches, for GPUs
      graphs.py     records GPU work as CUDA graphs and replays it
      bursts.py     samples several tokens for each sequence on the device, without returning to Python
      kernels.py    Triton kernels: a single token's attention over those blocks, and rotary embeddings
      fusing.py     replaces several kernels of transformers by one
      adapters.py   LoRA adapters, added to the weights
      sampling.py   temperature, top_k, top_p, seeds, and the exact logprobs of the sampled distribution
      prefixes.py   the caches of finished sequences, kept for the next turn of their session
    formats/
      checkpoint.py reads the folder of a Llama-like model: its shape, and its weights by name
      gguf.py       reads GGUF files
      convert.py    converts a GGUF file to an ordinary model folder
      sources.py    where models come from: a package index, the Hugging Face hub
    loading.py      loads a model and its tokenizer, without transformers where possible
    weights.py      models by a short name: fetched once, verified, cached
    shipped.py      the adapters in this package by name, and whether an adapter fits a model's weights
    batching.py     which sequences go into a step: joining, leaving, chunks of prompts, memory
    worker.py       the one thread that runs the model
    calls.py        one request in the event loop, and its response bodies
    call_registry.py  the open calls, between the event loop and that thread
    requests.py     request bodies, validated strictly
    texts.py        chat templates and plain text
    server.py       the routes, and the engine's start and stop
    base.py         types that models, caches and batcher share

Importing this package does not need the packages of the extra `rollyard[local]`; running a model does.
"""

from __future__ import annotations

from importlib.util import find_spec

NEEDED = ("torch", "transformers")

SHIPPED = ("yardwork",)
"""Adapters in this package, in `trained/`, by name."""


def missing_packages() -> tuple[str, ...]:
    """Returns the packages of `rollyard[local]` that are not installed."""
    return tuple(name for name in NEEDED if find_spec(name) is None)
