"""Checkpoints: safetensors and GGUF files, where they come from and how they are converted."""
