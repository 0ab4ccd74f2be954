"""Questions with known answers, drawn from a seed."""
