"""Stored chunks in other engines: what their processes run; needs neither jax nor a catalog."""
