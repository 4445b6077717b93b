"""The routes, one module per resource. All are below /v1, except those of `health`."""
