"""The engines of one policy: load, admission, and the seats of its rollouts."""
