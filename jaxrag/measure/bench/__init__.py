"""Benchmarks: ratios against a named peer, measured in one run."""
