"""Every test runs on eight fake CPU devices with strict dtype and rank promotion."""

import os
import signal

os.environ.setdefault("JAX_PLATFORMS", "cpu")
_FLAG = "--xla_force_host_platform_device_count=8"
if _FLAG not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAG}".strip()

import hypothesis  # noqa: E402
import jax  # noqa: E402

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
# A shell's background job inherits SIGINT as ignored, and so would every process that a test interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)
# A compiled function is checked for leaks by its own tests; deadlines would only measure the compiler.
hypothesis.settings.register_profile("kvmem", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("kvmem")
