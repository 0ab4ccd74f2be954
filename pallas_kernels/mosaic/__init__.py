"""Kernels in Pallas for Mosaic GPU (Hopper). Imported by the ops when such a body is chosen."""
