"""The checks of `rollyard doctor`."""
