"""Float32 oracles for tests only. They share no code with ``xla.py`` or with the kernels."""
