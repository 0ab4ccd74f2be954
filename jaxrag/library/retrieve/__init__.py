"""Indexes that find chunks for a question."""
