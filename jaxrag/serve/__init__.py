"""Questions in, answers out: what stands between somebody and the engine."""
