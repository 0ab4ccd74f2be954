"""Long-context tasks of any length: needle in a haystack, RULER's and InfiniteBench's kinds.

The shapes and the scoring are those of the published benchmarks; every word is the project's own,
so scores are not to be compared with published ones.
"""
