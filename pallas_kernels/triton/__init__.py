"""Kernels in Pallas for Triton, one file an op. Imported by the ops when such a body is chosen."""
