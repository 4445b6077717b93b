"""Resource limits of sandboxes: control groups, and a monitor for what the kernel does not enforce."""
