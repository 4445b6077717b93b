"""Rendering, exact splicing and trace building. Sampled tokens are kept, and never rendered again."""

from rollyard.tokens.base import Markers, Parsed, Renderer, ToolCall, ToolSchema
from rollyard.tokens.chatml import ChatML
from rollyard.tokens.reader import Delta, Reader
from rollyard.tokens.renderer_choice import load_renderer
from rollyard.tokens.tokenizer import Tokenizer, Tokenizers
from rollyard.tokens.trace import TraceBuilder, prompt_digest
from rollyard.tokens.verify import verify, verify_trace

__all__ = [
    "ChatML",
    "Delta",
    "Markers",
    "Parsed",
    "Reader",
    "Renderer",
    "Tokenizer",
    "Tokenizers",
    "ToolCall",
    "ToolSchema",
    "TraceBuilder",
    "load_renderer",
    "prompt_digest",
    "verify",
    "verify_trace",
]
