"""The forward pass: models, attention, caches, kernels and sampling."""
