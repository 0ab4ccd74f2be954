"""Endpoints of files, vector stores and embeddings."""
