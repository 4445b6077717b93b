"""Sandbox runtimes: bubblewrap, Apptainer, container engines, and local processes."""
