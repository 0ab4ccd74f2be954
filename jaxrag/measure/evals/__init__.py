"""Tasks that measure what a method costs in answers."""
