"""The launcher: the fork server that starts sandboxes, PID 1 of each sandbox, and their clients in the service."""
