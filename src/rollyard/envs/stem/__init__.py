"""The `stem` environment: a science question with choices or a known free-form answer."""
