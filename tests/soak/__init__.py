"""The full-size forms of tests that the suite runs small: `make soak`, or `python -m tests.soak [NAME …]`."""
