"""Reuse of cached KV: how chunks are encoded, chosen from, decoded over; each paper's method."""
