"""The kernels' operations in plain JAX: the CPU path, and the baseline that a kernel must beat."""
