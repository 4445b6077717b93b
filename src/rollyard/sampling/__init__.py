"""Groups, draws, filters, staleness and evaluations: what a trainer asks for, made of rollouts."""
