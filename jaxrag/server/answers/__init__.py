"""Endpoints that ask the model, and those beside them."""
