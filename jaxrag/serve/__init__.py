"""Questions in, answers out: what is between a caller and the engine."""
