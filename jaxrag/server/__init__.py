"""HTTP over the engine."""
