"""Kernels in Triton's own language, called through jax-triton, for what Pallas cannot say."""
