"""Sandbox runtimes: bubblewrap, Apptainer, container engines, and plain processes."""
