"""The parts of `rollyard demo`."""
