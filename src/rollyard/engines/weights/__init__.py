"""Weight versions: updating a policy's engines under running rollouts, and the version of each token."""
