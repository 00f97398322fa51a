import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvmem.formats import fp8, int4, qtensor

CASES = [("fp8_block", (16, 32)), ("int4_group", (1, 32))]


@pytest.mark.parametrize(("storage", "group"), CASES, ids=["fp8", "int4"])
def test_qtensor_stack_matches_its_layers(storage, group):
    w = jax.random.normal(jax.random.key(0), (3, 48, 96))
    stack = qtensor.quantize(w, storage, group)
    assert stack.shape == w.shape
    assert stack.scale.shape == qtensor.scale_shape(w.shape, storage, group)
    assert stack.scale.dtype == qtensor.scale_dtype(storage)
    whole = stack.dequantize(jnp.float32)
    np.testing.assert_array_equal(stack.layer(2).dequantize(jnp.float32), whole[2])
    alone = qtensor.quantize(w[2], storage, group)
    np.testing.assert_array_equal(alone.dequantize(jnp.float32), whole[2])
    # The mutation: another layer's scales.
    wrong = qtensor.QTensor(stack.data[2], stack.scale[0], storage, group)
    assert not np.array_equal(wrong.dequantize(jnp.float32), whole[2])


def test_qtensor_is_a_pytree_with_two_leaves_and_static_format():
    tensor = qtensor.quantize(jnp.ones((48, 96)), "int4_group", (1, 32))
    leaves, treedef = jax.tree.flatten(tensor)
    assert [leaf.dtype for leaf in leaves] == [jnp.int4, jnp.bfloat16]
    other = qtensor.quantize(jnp.ones((48, 96)), "int4_group", (1, 16))
    assert treedef != jax.tree.structure(other)
    assert jax.jit(lambda t: t.dequantize(jnp.bfloat16))(tensor).dtype == jnp.bfloat16


def test_qtensor_dequantize_uses_its_own_format():
    w = jax.random.normal(jax.random.key(1), (32, 64))
    block = qtensor.quantize(w, "fp8_block", (16, 32))
    values, scale = fp8.quantize_blocks(w, (16, 32))
    np.testing.assert_array_equal(
        block.dequantize(jnp.float32), fp8.dequantize_blocks(values, scale, (16, 32), jnp.float32)
    )
    group = qtensor.quantize(w, "int4_group", (1, 32))
    q, scale = int4.quantize_groups(w, 32)
    np.testing.assert_array_equal(
        group.dequantize(jnp.float32), int4.dequantize_groups(q, scale, jnp.float32)
    )


def test_quantize_unknown_storage_is_refused():
    with pytest.raises(ValueError, match="'plain'"):
        qtensor.quantize(jnp.ones((4, 8)), "plain", (1, 8))


def test_quantize_int4_with_row_groups_is_refused():
    with pytest.raises(ValueError, match="rows must be 1"):
        qtensor.quantize(jnp.ones((4, 8)), "int4_group", (2, 8))


def test_scale_shape_group_that_does_not_divide_names_k_and_group():
    with pytest.raises(ValueError, match="K = 40 is not a multiple of the group 32"):
        qtensor.scale_shape((3, 40), "int4_group", (1, 32))
