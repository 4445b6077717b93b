# pyright: reportMissingImports=false
"""Runs a transformers causal language model over many sequences of different lengths in one forward pass.

The given model is not modified: the engine runs a second tree of modules with the *same* parameters and buffers, in
evaluation mode and with the attention of `attention.py`. A trainer may keep its own mode, attention and hooks, and the
engine uses the weights that it writes in place. (Parameters that it replaces are not shared.)

Whether a model can be run this way is tested, not looked up: `check` compares the result with a plain forward pass of
the given model. A model with state other than keys and values (Mamba, linear attention), or whose attention takes more
inputs than these, is refused with the measured difference.
"""

from __future__ import annotations

import copy
import logging
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollyard.embedded.base import BLOCK_TOKENS, Piece
from rollyard.embedded.transformer.adapters import Adapter, BadAdapter, is_adapter, read_adapter
from rollyard.embedded.transformer.attention import NAME, Kv, Row, attention
from rollyard.embedded.transformer.fusing import find_kernels, fuse_norms, fuse_rotations
from rollyard.embedded.transformer.graphs import at_device
from rollyard.embedded.transformer.paged import Batches, BlockPool, LayerShape, PagedKv
from rollyard.embedded.transformer.sampling import NO_NUMBERS, SampledDraw, SamplingRule

log = logging.getLogger("rollyard.embedded")

CHECK_TOKENS = 12
FUSED = frozenset({"cuda"})  # devices on which our Triton kernels are tried
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}  # nats; half precision rounds sums in another order
_COARSE_TOLERANCE, _HALF_TOLERANCE = 0.1, 0.5


class Unsupported(Exception):
    """A model, a folder or weights that cannot be used; the message gives the reason."""


class Model:
    """A transformers model, sharing the weights of the given module. Used by one thread at a time."""

    def __init__(self, module: Any, max_context: int | None = None) -> None:
        from transformers import AttentionInterface

        AttentionInterface.register(NAME, attention)
        self._original = module
        self._module = _shared_copy(module)
        self._module.set_attn_implementation(NAME)
        config = module.config.get_text_config()
        self.vocabulary = int(config.vocab_size)
        longest = getattr(config, "max_position_embeddings", None)
        self.max_context = int(max_context or longest or 4096)
        if longest and self.max_context > longest:
            raise Unsupported(f"a context of {self.max_context} tokens, but the model was made for {longest}")
        if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
            raise Unsupported(f"{type(module).__name__} uses chunked attention, which is not supported")
        self.eos_ids = _eos_ids(module)
        self.bytes_per_token = 1
        self._shapes: dict[int, LayerShape] = {}
        self._pool: BlockPool | None = None
        self._batches: Batches | None = None
        self._bases: dict[str, tuple[Tensor, int]] = {}  # originals of weights that the adapter changed

    def new_kv(self) -> Kv | PagedKv:
        return Kv(self.max_context) if self._pool is None else PagedKv(self._pool)

    @property
    def device(self) -> torch.device:
        return next(self._module.parameters()).device

    @torch.inference_mode()
    def forward(self, pieces: Sequence[Piece]) -> Tensor:
        """Returns the logits after the last token of each piece with `wants_logits`. Extends the caches."""
        for piece in pieces:
            if (size := piece.kv.length + len(piece.tokens)) > piece.kv.capacity:
                piece.kv.reserve(size)
        logits = self._run_ragged(pieces) if self._batches is None else self._batches.forward(pieces)
        for piece in pieces:
            piece.kv.advance(len(piece.tokens))
        return logits

    @property
    def has_bursts(self) -> bool:
        return self._batches is not None

    @torch.inference_mode()
    def burst(self, pieces: Sequence[Piece], draws: Sequence[SamplingRule], count: int) -> list[list[SampledDraw]]:
        """Samples `count` tokens for each piece, which has a single token and whose cache has room for them. The caller
        advances the caches by the tokens that it uses."""
        assert self._batches is not None
        tokens, logprobs = (tensor.tolist() for tensor in self._batches.burst(pieces, draws, count))
        drawn_rows = [
            [SampledDraw(*one) for one in zip(*row, strict=True)] for row in zip(tokens, logprobs, strict=True)
        ]
        if not all(math.isfinite(one.logprob) for row in drawn_rows for one in row):
            raise ArithmeticError(NO_NUMBERS)
        return drawn_rows

    def _run_ragged(self, pieces: Sequence[Piece]) -> Tensor:
        ids: list[int] = []
        places: list[int] = []
        rows: list[Row] = []
        logit_rows: list[int] = []
        for piece in pieces:
            start = piece.kv.length
            rows.append(Row(piece.kv, len(ids), len(ids) + len(piece.tokens)))
            places += range(start, start + len(piece.tokens))
            ids += piece.tokens
            if piece.wants_logits:
                logit_rows.append(len(ids) - 1)
        output = self._module(
            input_ids=torch.tensor([ids], device=self.device),
            position_ids=torch.tensor([places], device=self.device),
            logits_to_keep=torch.tensor(logit_rows or [len(ids) - 1], device=self.device),
            use_cache=False,
            ragged_rows=rows,
        )
        return output.logits[0] if logit_rows else output.logits[0, :0]

    # --- preparation

    def check(self) -> None:
        """Raises Unsupported if the result differs from a plain forward pass of the given model."""
        self._pool = self._batches = None
        self.bytes_per_token, self._shapes = self._compare()

    def take_pool(self, tokens: int) -> int:
        """Allocates a block pool for all later caches. Returns its capacity in tokens, rounded down to whole blocks."""
        dtype = next(self._module.parameters()).dtype
        try:
            self._pool = BlockPool(self._shapes, tokens // BLOCK_TOKENS + 1, dtype, self.device)
        except RuntimeError as error:
            raise Unsupported(f"not enough memory for a cache of {tokens} tokens: choose a smaller one") from error
        if self.device.type not in FUSED or not self._take_fused(self._pool):
            self._batches = Batches(self._module, self._pool, self.device)
            self._compare()
        return tokens // BLOCK_TOKENS * BLOCK_TOKENS

    def _take_fused(self, pool: BlockPool) -> bool:
        """Uses our Triton kernels if the results agree, else restores the model. Returns whether they are used."""
        kernels = find_kernels()
        with at_device(self.device):
            fuse_norms(self._module)
            sizes = {shape.key_size for shape in self._shapes.values()}
            if kernels and len(sizes) == 1:
                fuse_rotations(self._module, sizes.pop(), kernels.rotate)
        self._batches = Batches(self._module, pool, self.device, kernels.attend_one if kernels else None)
        try:
            self._compare()
        except Unsupported as error:
            log.warning("the Triton kernels cannot be used: using plain torch", extra={"error": str(error)})
            self._module = _shared_copy(self._original)
            self._module.set_attn_implementation(NAME)
            return False
        return True

    def forget_numbers(self) -> None:
        """Clears the pool after non-finite values were computed: they would not vanish when multiplied by zero."""
        if self._pool is not None:
            self._pool.clear()

    @torch.inference_mode()
    def _compare(self) -> tuple[int, dict[int, LayerShape]]:
        """Raises Unsupported if pieces give other logprobs than the whole. Returns bytes per token and layer shapes."""
        ids = [(7 * n + 1) % self.vocabulary for n in range(CHECK_TOKENS)]
        plain = _shared_copy(self._original)(input_ids=torch.tensor([ids], device=self.device), use_cache=False).logits[
            0
        ]
        first, second = self.new_kv(), self.new_kv()
        half = CHECK_TOKENS // 2
        try:
            self.forward([Piece(ids[:half], first, True), Piece(ids[:-1], second, False)])
            actual = self.forward([Piece(ids[half:-1], first, True), Piece(ids[-1:], second, True)])
            sizes = (first.bytes_per_token, first.shapes) if isinstance(first, Kv) else (0, {})
        except Exception as error:  # a model's own code may raise anything for unknown arguments
            raise Unsupported(f"{type(self._original).__name__} cannot be run here: {error}") from error
        finally:
            first.free()
            second.free()
        expected = plain[[-2, -1]]
        gap = float((actual.float().log_softmax(-1) - expected.float().log_softmax(-1)).abs().max())
        if not gap <= _tolerance(plain):
            raise Unsupported(
                f"{type(self._original).__name__} cannot be run here: "
                f"computed in pieces its logprobs are off by {gap:.3g}"
            )
        return sizes

    # --- other weights

    def read_weights(self, folder: Path) -> Mapping[str, Tensor] | Adapter:
        """Reads weights or an adapter from a folder and checks that they fit this model. Writes nothing."""
        if is_adapter(folder):
            try:
                return read_adapter(folder, self._module.state_dict())
            except BadAdapter as error:
                raise Unsupported(str(error)) from error
        fresh = load_module(folder, device="cpu", dtype=next(self._original.parameters()).dtype).state_dict()
        known = self._module.state_dict()
        missing = sorted(known.keys() ^ fresh.keys())
        other = sorted(name for name in known.keys() & fresh.keys() if known[name].shape != fresh[name].shape)
        if missing or other:
            named = ", ".join((missing or other)[:3])
            raise Unsupported(
                f"the weights in {folder} are not of this model: {named} {'…' if len(missing) > 3 else ''}"
            )
        return fresh

    @torch.no_grad()
    def write_weights(self, weights: Mapping[str, Tensor] | Adapter) -> None:
        """Writes in place. The caller ensures that nothing is being sampled, and clears all caches. An adapter is added
        to the weights without the previous adapter; a weight that a trainer has written since then is taken as is."""
        known = self._module.state_dict()
        if not isinstance(weights, Adapter):
            self._bases.clear()
            for name, tensor in weights.items():
                known[name].copy_(tensor)
            return
        for name, (_, version) in [*self._bases.items()]:
            if known[name]._version != version:  # written by a trainer since then: the current value is the base
                del self._bases[name]
        for name in self._bases.keys() - weights.pairs.keys():  # changed by the previous adapter only
            known[name].copy_(self._bases.pop(name)[0])
        for name in weights.pairs:
            base = self._bases[name][0] if name in self._bases else known[name].clone()
            known[name].copy_(weights.added(name, base))
            self._bases[name] = (base, known[name]._version)


def _tolerance(logits: Tensor) -> float:
    """In nats. Larger where float32 products are computed with fewer bits, because they round differently."""
    if logits.dtype == torch.float32 and logits.is_cuda and torch.get_float32_matmul_precision() != "highest":
        return _COARSE_TOLERANCE
    return _TOLERANCE.get(logits.dtype, _HALF_TOLERANCE)


def choose_device(name: str) -> str:
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise Unsupported(f"device {name} cannot be used: {str(error).splitlines()[0]}") from error
    return name


def choose_dtype(name: str, device: str) -> Any:
    """On a CPU `auto` is float32: many CPUs have no arithmetic of lower precision."""
    if name == "auto":
        return torch.float32 if device == "cpu" else "auto"
    return getattr(torch, name)


def load_module(name: str | Path, *, device: str, dtype: Any = "auto") -> Any:
    """Loads a model from a folder, a GGUF file (or a folder with one), or a cached hub name."""
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    if not sys.stderr.isatty():
        disable_progress_bar()
    folder, more = weights_place(name)
    if "gguf_file" in more:
        from transformers import GgufConfig

        more["quantization_config"] = GgufConfig(dequantize=True)
    try:
        module: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **more)
        return module.to(device)
    except (OSError, ValueError, ImportError) as error:
        raise Unsupported(f"{name} cannot be loaded: {str(error).splitlines()[0]}") from error


def _shared_copy(module: Any) -> Any:
    """Returns a copy of the module tree with the same tensors, in evaluation mode."""
    tensors = [*module.parameters(), *module.buffers()]
    return copy.deepcopy(module, {id(tensor): tensor for tensor in tensors}).eval()


def weights_place(name: str | Path) -> tuple[str, dict[str, Any]]:
    """Returns the folder or hub name for transformers, and further arguments."""
    path = Path(name)
    if path.suffix == ".gguf" and path.is_file():
        return str(path.parent), {"gguf_file": path.name}
    if path.is_dir() and not (path / "config.json").exists() and (files := sorted(path.glob("*.gguf"))):
        if len(files) > 1:
            raise Unsupported(f"{name} has {len(files)} GGUF files: name one of them")
        return str(path), {"gguf_file": files[0].name}
    return str(name), {}


def _eos_ids(module: Any) -> frozenset[int]:
    """Returns the end-of-sequence tokens."""
    for source in (getattr(module, "generation_config", None), module.config):
        eos_ids = getattr(source, "eos_token_id", None)
        if eos_ids is not None:
            return frozenset(eos_ids if isinstance(eos_ids, list) else [eos_ids])
    return frozenset()
