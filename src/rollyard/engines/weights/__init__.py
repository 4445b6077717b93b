"""Weight versions: updating a policy's engines while rollouts run, and the version of each token."""
