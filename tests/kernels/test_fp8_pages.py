"""The thread-by-thread code of FP8 pages, run on NumPy: which bytes go where, and what they become."""

import numpy as np
import pytest

from pallas_kernels import fp8_pages
from tests.kernels import lanes

PAGES, TOKENS, ROPE = 5, 64, 64
ROPE_AT, SCALES_AT, VALUES_OUT, ROPE_OUT, POWERS_OUT = 2**18, 3 * 2**17, 2**19, 5 * 2**17, 3 * 2**18


def _untile(memory, base, width):
    """(64, width) of 16-bit words from tiles of 8 rows of 128 bytes whose 16-byte chunks are swizzled."""
    raw = memory[base : base + 128 * width].view(np.uint16).reshape(8, width // 64, 8, 8, 8)
    chunk = np.arange(8)[None, :] ^ np.arange(8)[:, None]
    plain = np.take_along_axis(raw, chunk[None, None, :, :, None], axis=3)
    return plain.transpose(0, 2, 1, 3, 4).reshape(64, width)


def _convert(*, scaled: bool, valid: int):
    """Converts page 3 with page 1 next: (machine, values, scales, rope, what is fetched, what should be)."""
    rng = np.random.default_rng(0)
    width = 512 if scaled else 576
    machine = lanes.Machine(2**20)
    kernel = machine.load(fp8_pages)
    bits = rng.integers(0, 256, (PAGES, TOKENS, width), np.uint8)
    bits[bits & 0x7F == 0x7F] = 0
    bits[3, valid:] = 0x7F  # NaN
    scales = np.exp2(rng.uniform(-9, 1, (PAGES, TOKENS, 4))).astype(np.float32)
    rope = rng.standard_normal((PAGES, TOKENS, ROPE)).astype(lanes.BF16)
    scales[3, valid:], rope[3, valid:] = np.nan, np.nan
    arrays = [(0, bits, 1), (ROPE_AT, rope, 2), (SCALES_AT, scales, 4)][: 3 if scaled else 1]
    for base, array, _ in arrays:
        machine.write(base, array)
    pool = tuple(lanes.Ref(base, (1, *array.shape), size) for base, array, size in arrays)
    outs = [lanes.Ref(VALUES_OUT, (8, width // 64, 8, 64), 2)]
    outs += [lanes.Ref(ROPE_OUT, (8, 1, 8, 64), 2), lanes.Ref(POWERS_OUT, (64,), 4)] if scaled else []
    page, following = lanes.scalar(3), lanes.scalar(1)
    fetched = kernel.fetch(pool, page)
    ahead = kernel.convert(fetched, pool, page, following, lanes.scalar(valid), tuple(outs), None)
    values = bits[3].view(lanes.E4M3).astype(np.float64)
    wanted = kernel.fetch(pool, following)
    return machine, values, scales[3].astype(np.float64), rope[3].astype(np.float64), ahead, wanted


@pytest.mark.parametrize("valid", [1, 37, 64])
@pytest.mark.parametrize("scaled", [False, True])
def test_convert_page_writes_each_value_once_and_fetches_the_next(scaled, valid):
    machine, values, scales, rope, ahead, wanted = _convert(scaled=scaled, valid=valid)
    width = values.shape[1]
    assert (machine.writes[VALUES_OUT : VALUES_OUT + 128 * width] == 1).all()
    got = _untile(machine.memory, VALUES_OUT, width).view(np.float16).astype(np.float64)
    np.testing.assert_array_equal(got[valid:], 0.0)
    for one, other in zip(ahead.registers, wanted.registers, strict=True):
        np.testing.assert_array_equal(one, other)
    if not scaled:
        np.testing.assert_array_equal(got[:valid], values[:valid])
        return
    power = machine.memory[POWERS_OUT : POWERS_OUT + 256].view(np.float32).astype(np.float64)[:valid, None]
    largest = scales[:valid].max(axis=1, keepdims=True)
    assert ((largest <= power) & (power < 2 * largest) & (np.log2(power) % 1 == 0)).all()
    exact = values[:valid] * np.repeat(scales[:valid], 128, axis=1)
    # One rounding to f16 (2**-11 of a binade at most), or half of its smallest step, times the token's power.
    assert (np.abs(got[:valid] * power - exact) <= np.abs(exact) * 2.0**-11 + power * 2.0**-24).all()
    got_rope = _untile(machine.memory, ROPE_OUT, ROPE).view(lanes.BF16).astype(np.float64)
    np.testing.assert_array_equal(got_rope[:valid] * power, rope[:valid])
    np.testing.assert_array_equal(got_rope[valid:], 0.0)
