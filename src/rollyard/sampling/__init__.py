"""Groups, draws, filters, staleness, evaluations: what a trainer really wants of rollouts."""
