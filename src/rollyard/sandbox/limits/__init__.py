"""Resource limits of sandboxes: control groups, and a resource monitor for limits that the kernel does not enforce."""
