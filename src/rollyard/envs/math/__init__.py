"""The `math` environment: a question with a known answer, scored by `math-verify`."""
