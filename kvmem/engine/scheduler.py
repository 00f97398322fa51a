"""The scheduler: which rows prefill, decode, wait or retract. Host only; it imports no JAX."""
