"""The harness itself: a correct kernel passes every tier, a broken one fails the tier meant to catch it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from tests.kernels import harness


def _double(x_gmem, out_gmem, x_smem, out_smem, barrier, *, commit: bool):
    plgpu.copy_gmem_to_smem(x_gmem, x_smem, barrier)
    plgpu.barrier_wait(barrier)
    out_smem[...] = x_smem[...] * 2
    if commit:
        plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(out_smem, out_gmem)
    plgpu.wait_smem_to_gmem(0)


def _kernel(x, commit=True):
    smem = plgpu.SMEM(x.shape, x.dtype)
    return plgpu.kernel(
        lambda *refs: _double(*refs, commit=commit),
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        scratch_types=[smem, smem, plgpu.Barrier()],
    )(x)


X = np.arange(3 * 128, dtype=np.float32).reshape(3, 128)


def test_interpret_correct_kernel_returns_its_numbers():
    np.testing.assert_array_equal(harness.interpret(_kernel, X), 2 * X)


def test_interpret_missing_commit_is_found_as_a_race():
    with pytest.raises(Exception, match=r"(?i)race"):
        harness.interpret(lambda x: _kernel(x, commit=False), X)
    np.testing.assert_array_equal(harness.interpret(_kernel, X), 2 * X)  # the failure left no state behind


def test_lower_wgmma_of_odd_columns_raises():
    def matmul(x_gmem, out_gmem):
        def product(acc_ref, x_smem):
            plgpu.wgmma(acc_ref, x_smem, x_smem.at[:5].T)
            return acc_ref[...]

        out_gmem[...] = jax.experimental.pallas.run_scoped(
            product, plgpu.ACC((64, 5), jnp.float32), plgpu.SMEM((64, 64), jnp.float16)
        )

    call = plgpu.kernel(matmul, out_type=jax.ShapeDtypeStruct((64, 5), jnp.float32))
    with pytest.raises(Exception):  # noqa: B017, PT011 - a bare AssertionError in some versions
        harness.lower(call, jax.ShapeDtypeStruct((64, 64), jnp.float16))


@pytest.mark.aot
@harness.needs_ptxas
def test_compile_h200_reports_registers_and_copies():
    compiled = harness.compile_h200(_kernel, X)
    assert compiled.spills == 0
    assert all(0 < registers <= 255 for registers, _ in compiled.kernels)
    harness.assert_no_copy(compiled.hlo, (5, 5))
    copied = harness.compile_h200(lambda x: _kernel(x + 1), X)
    with pytest.raises(AssertionError, match="is made by"):
        harness.assert_no_copy(copied.hlo, X.shape)
