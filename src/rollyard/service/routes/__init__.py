"""The calls, one file per thing. All are below /v1, but for those of `health`."""
