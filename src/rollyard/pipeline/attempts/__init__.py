"""One attempt of a rollout: its stages, their sandboxes, and the record of its end."""
