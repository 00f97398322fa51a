"""Paged MLA decode: plain JAX and the kernel in the interpreter, against a row-by-row f64 oracle."""

import dataclasses
import functools
import itertools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import fragments, mla_decode, mla_schedule, ref, xla
from pallas_kernels.common import tuned
from pallas_kernels.mla_decode import Pool
from tests.kernels import harness

PAGE = 64
SOFTMAX_SCALE = 0.07
FLAT_SCALE = 0.05
# Around every boundary of a page, and a row of several pages; a row of nothing.
LENGTHS = (0, 1, 63, 64, 65, 97, 127, 200)
FEW_LENGTHS = (0, 1, 64, 97)  # where the interpreter is slow: many columns

# Relative error of a row's output. bf16 weights of the output are rounded by 2**-9 each; the latents that
# they weigh correlate by 512**-0.5. The f16 path rounds weights by 2**-12, its latents and queries are exact.
# XLA in f32: 576 additions, 2**-24 each. The wide kernel of fp8_656 rounds latents times ratios of scales by
# 2**-12, uniformly. The 512 products of a score, up to 4 * SOFTMAX_SCALE each, then deviate by SCORE: four
# times it bounds a log-sum-exp; an output moves most with two tokens of equal weight, by SCORE / 2**0.5.
SCORE = 4 * SOFTMAX_SCALE * 512**0.5 * 2.0**-12 / 3**0.5
TOLERANCE = {
    "bf16": 2.0**-9 * (1 + 512**-0.5),
    "fp8_flat": 2.0**-12,
    "fp8_656": 2.0**-12,
    "fp8_flat.wide": 2.0**-12 * (1 + 512**-0.5),
    "fp8_656.wide": 2.0**-11 + 4 * SCORE / 2**0.5,
    "xla": 2.0**-15,
}


@dataclasses.dataclass(frozen=True)
class Case:
    q_BTHC: jax.Array
    pool: Pool
    layer: int
    table_BM: np.ndarray
    length_B: np.ndarray
    num_new_B: np.ndarray

    def arguments(self):
        return self.q_BTHC, self.pool, jnp.int32(self.layer), self.table_BM, self.length_B, self.num_new_B

    def expected(self, layout):
        scale = FLAT_SCALE if layout == "fp8_flat" else 1.0
        pool_YPZC = ref.mla_pool(*self.pool, scale=scale)
        return ref.mla_decode(
            np.asarray(self.q_BTHC, np.float32),
            pool_YPZC,
            self.layer,
            self.table_BM,
            self.length_B,
            softmax_scale=SOFTMAX_SCALE,
            num_new_B=self.num_new_B,
        )


@functools.cache
def make_case(layout, tokens, heads, lengths=LENGTHS) -> Case:
    case = ref.mla_case(layout, tokens, heads, lengths, flat_scale=FLAT_SCALE)
    pool = Pool(*(None if array is None else jnp.asarray(array) for array in case["pool"]))
    q = jnp.asarray(case["q"])
    return Case(q, pool, case["layer"], case["table"], case["length"], case["num_new"])


def attend(layout, implementation, case: Case, **options):
    scale = jnp.float32(FLAT_SCALE) if layout == "fp8_flat" else None
    if implementation == "xla":
        operation = xla.mla_decode
    else:
        tokens, heads = case.q_BTHC.shape[1:3]
        columns = mla_decode.column_groups(tokens, heads)[1]
        config = mla_decode.tuned_config(layout, columns, 7 if columns <= mla_schedule.NARROW else 64)
        config = dataclasses.replace(config, blocks=2)
        operation = functools.partial(mla_decode.mla_decode, config=config, sim=True)

    def call(q, pool, layer, table, length, num_new):
        return operation(
            q,
            pool,
            layer,
            table,
            length,
            num_new_B=num_new,
            softmax_scale=SOFTMAX_SCALE,
            layout=layout,
            scale=scale,
            **options,
        )

    arguments = case.arguments()
    return jax.jit(call)(*arguments) if implementation == "xla" else harness.interpret(call, *arguments)


def row_errors(out, expected) -> np.ndarray:
    """Relative error of each (row, token, head); absolute where the expected output is zero."""
    out = np.asarray(out, np.float64)
    norm = np.linalg.norm(expected, axis=-1)
    return np.linalg.norm(out - expected, axis=-1) / np.where(norm > 0, norm, 1.0)


CONTRACT = [
    pytest.param("xla", "bf16", 1, 8, id="xla-bf16-h8"),
    pytest.param("xla", "fp8_flat", 3, 5, id="xla-fp8_flat-t3-h5"),
    pytest.param("xla", "fp8_656", 2, 8, id="xla-fp8_656-t2-h8"),
    pytest.param("interpreter", "bf16", 1, 8, id="interpreter-bf16-h8"),
    pytest.param("interpreter", "fp8_flat", 1, 8, id="interpreter-fp8_flat-h8"),
    pytest.param("interpreter", "fp8_656", 2, 5, id="interpreter-fp8_656-t2-h5"),
    pytest.param("interpreter", "bf16", 3, 8, id="interpreter-bf16-t3-h8"),
    pytest.param("interpreter", "fp8_656", 1, 24, id="interpreter-fp8_656-h24"),
    pytest.param("interpreter", "bf16", 3, 16, id="interpreter-bf16-t3-h16", marks=pytest.mark.slow),
    pytest.param("interpreter", "fp8_flat", 1, 72, id="interpreter-fp8_flat-h72", marks=pytest.mark.slow),
    pytest.param("interpreter", "fp8_656", 2, 20, id="interpreter-fp8_656-t2-h20", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("implementation", "layout", "tokens", "heads"), CONTRACT)
def test_C10_mla_decode_every_length_matches_oracle(implementation, layout, tokens, heads):
    wide = implementation == "interpreter" and tokens * heads > mla_schedule.NARROW
    case = make_case(layout, tokens, heads, FEW_LENGTHS if wide else LENGTHS)
    if wide and layout == "bf16":  # maxima rise so much from page to page that sums are rescaled
        case = dataclasses.replace(case, q_BTHC=case.q_BTHC * 4)
    out, lse = attend(layout, implementation, case)
    expected_out, expected_lse = case.expected(layout)
    name = "xla" if implementation == "xla" else layout
    tolerance = TOLERANCE.get(f"{name}.wide" if wide else name, TOLERANCE[name])
    assert row_errors(out, expected_out).max() < tolerance
    empty = np.isneginf(expected_lse)
    assert empty[0].all()
    np.testing.assert_array_equal(np.isneginf(np.asarray(lse)), empty)
    np.testing.assert_array_equal(np.asarray(out)[empty], 0.0)
    # Scores are f32 sums of products, exact but for ``SCORE``: 576 roundings of 2**-24 of scores below 64.
    atol = 4 * SCORE if layout == "fp8_656" and wide else 1e-4
    np.testing.assert_allclose(np.asarray(lse)[~empty], expected_lse[~empty], atol=atol)


def _shift_columns(pool):
    return pool._replace(values=jnp.roll(pool.values, 1, axis=-1))


def _flip_bit(pool):
    return pool._replace(
        values=pool.values ^ pool.values.dtype.type(1 << (8 * pool.values.dtype.itemsize - 2))
    )


MUTATIONS = {
    "shifted_latents": lambda c: dataclasses.replace(c, pool=_shift_columns(c.pool)),
    "zeros": lambda c: dataclasses.replace(c, pool=c.pool._replace(values=jnp.zeros_like(c.pool.values))),
    "shifted_page": lambda c: dataclasses.replace(c, table_BM=np.roll(c.table_BM, 1, axis=1)),
    "flipped_bit": lambda c: dataclasses.replace(c, pool=_flip_bit(c.pool)),
    "stale_scale": lambda c: dataclasses.replace(
        c, pool=c.pool._replace(scales=jnp.roll(c.pool.scales, 1, axis=2))
    ),
    "other_layer": lambda c: dataclasses.replace(c, layer=c.layer + 1),
    "one_token_less": lambda c: dataclasses.replace(c, length_B=np.maximum(c.length_B - 1, 0)),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_mla_decode_mutated_input_fails_the_contract(mutation):
    """The contract's comparison is sensitive to each input: every row of tokens must leave its tolerance."""
    case = make_case("fp8_656", 2, 8)
    out, _ = attend("fp8_656", "xla", MUTATIONS[mutation](case))
    expected, _ = case.expected("fp8_656")
    errors = row_errors(np.nan_to_num(np.asarray(out), nan=1e3), expected)
    assert (errors.max(axis=(1, 2))[2:] > TOLERANCE["fp8_656"]).all()


def test_mla_decode_batch_invariant_row_alone_has_the_same_bits():
    lengths = (100, 64 * 33 + 5, 31)
    case = make_case("bf16", 1, 8, lengths)
    together, _ = attend("bf16", "interpreter", case, batch_invariant=True)
    alone = dataclasses.replace(
        case,
        q_BTHC=case.q_BTHC[1:2],
        table_BM=case.table_BM[1:2],
        length_B=case.length_B[1:2],
        num_new_B=case.num_new_B[1:2],
    )
    solo, _ = attend("bf16", "interpreter", alone, batch_invariant=True)
    np.testing.assert_array_equal(np.asarray(together)[1], np.asarray(solo)[0])


def _items(schedule):
    item_I3, block_first, row_first = (np.asarray(x) for x in schedule)
    return item_I3[: row_first[-1]], block_first, row_first


@hypothesis.settings(max_examples=20)
@hypothesis.given(
    lengths=st.lists(st.integers(0, 40 * PAGE), min_size=2, max_size=9),
    groups=st.integers(1, 2),
    blocks=st.integers(1, 13),
    batch_invariant=st.booleans(),
)
def test_make_schedule_any_lengths_covers_each_page_once(lengths, groups, blocks, batch_invariant):
    schedule = mla_decode.make_schedule(
        jnp.asarray(lengths, jnp.int32),
        max_pages=40,
        groups=groups,
        blocks=blocks,
        batch_invariant=batch_invariant,
    )
    items, block_first, row_first = _items(schedule)
    pages = [-(-n // PAGE) for n in lengths for _ in range(groups)]
    for row, count in enumerate(pages):
        own = items[row_first[row] : row_first[row + 1]]
        assert [row] * len(own) == own[:, 0].tolist()
        covered = list(itertools.chain.from_iterable(range(begin, end) for _, begin, end in own))
        assert covered == list(range(count))
    assert block_first[0] == 0
    assert block_first[-1] == len(items)
    assert (np.diff(block_first) >= 0).all()
    if not batch_invariant:
        load = [sum(e - b for _, b, e in items[i:j]) for i, j in itertools.pairwise(block_first)]
        assert max(load) == -(-sum(pages) // blocks)


def test_make_schedule_batch_invariant_cuts_do_not_depend_on_other_rows():
    def cuts(lengths, row):
        schedule = mla_decode.make_schedule(
            jnp.asarray(lengths, jnp.int32), max_pages=200, batch_invariant=True
        )
        items, _, row_first = _items(schedule)
        return items[row_first[row] : row_first[row + 1], 1:].tolist()

    assert cuts([9000, 40], 0) == cuts([77, 12000, 9000], 2)
    assert len(cuts([9000, 40], 0)) == 5


def test_row_of_latent_is_a_permutation_of_the_block():
    for words in (1, 2, 4):
        rows = [fragments.row_of_latent(column, words) for column in range(128 * words)]
        assert sorted(rows) == list(range(128 * words))
    assert sorted(map(fragments.permuted_column, range(64))) == list(range(64))


def _with(case, **changes):
    names = ("q_BTHC", "pool", "layer", "table_BM", "length_B")
    arguments = dict(zip(names, map(jax.tree.map, [jnp.asarray] * 5, case.arguments()), strict=False))
    options = {"softmax_scale": SOFTMAX_SCALE, "layout": "bf16"}
    return mla_decode.mla_decode(**(arguments | options | changes))


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"layout": "fp8"}, ValueError, "layout='fp8'"),
        ({"layout": "fp8_flat"}, ValueError, r"pool\.values is"),
        ({"layout": "fp8_656"}, ValueError, r"pool\.(values|scales)"),
        ({"scale": 2.0}, ValueError, "scale: layout bf16"),
        ({"q_BTHC": jnp.zeros((8, 1, 8, 576))}, ValueError, "must be bfloat16"),
        ({"q_BTHC": jnp.zeros((8, 1, 8, 320), jnp.bfloat16)}, NotImplementedError, "width 320"),
        ({"pool": Pool(jnp.zeros((2, 5, 16, 576), jnp.uint16))}, NotImplementedError, "page size 16"),
        ({"length_B": jnp.zeros((8,), jnp.int16)}, ValueError, "length_B is int16"),
        ({"config": mla_decode.Config(consumers=2, stages=3)}, ValueError, "multiple of consumers"),
    ],
)
def test_mla_decode_wrong_argument_is_refused(changes, error, match):
    with pytest.raises(error, match=match):
        _with(make_case("bf16", 1, 8), **changes)


def abstract(layout, rows, tokens, heads, pages=70_001):
    """Arguments at serving size: a pool of more than 2**31 elements."""
    array = jax.ShapeDtypeStruct
    pool = {
        "bf16": Pool(array((2, pages, PAGE, 576), jnp.uint16)),
        "fp8_flat": Pool(array((2, pages, PAGE, 576), jnp.uint8)),
        "fp8_656": Pool(
            array((2, pages, PAGE, 512), jnp.uint8),
            array((2, pages, PAGE, 4), jnp.float32),
            array((2, pages, PAGE, 64), jnp.uint16),
        ),
    }[layout]
    i32 = jnp.int32
    return (
        array((rows, tokens, heads, 576), jnp.bfloat16),
        pool,
        array((), i32),
        array((rows, 16_384), i32),  # 1,048,576 tokens
        array((rows,), i32),
    )


def compiled_call(layout):
    def call(q, pool, layer, table, length):
        return mla_decode.mla_decode(
            q, pool, layer, table, length, softmax_scale=SOFTMAX_SCALE, layout=layout
        )

    return call


SHAPES = {"n8": (1, 8), "n16": (2, 8), "wide": (1, 64)}
ROWS = {"b1": 1, "few": 9, "many": 64}


@pytest.mark.parametrize("key", tuned("mla_decode"))
def test_mla_decode_tuned_tiles_lower(key):
    layout, shape, rows = key.split(".")
    tokens, heads = SHAPES[shape]
    lowered = harness.lower(compiled_call(layout), *abstract(layout, ROWS[rows], tokens, heads))
    assert lowered.as_text().count("mosaic_gpu") >= 2  # the attention and the merge


# The hot shapes. 656-byte pages keep two words of the schedule in local memory, read once an item; the wide
# kernel of FP8 some of the warpgroup that converts, two of which it reads once a page.
SPILLED_BYTES = {
    ("bf16", "n8"): 0,
    ("bf16", "n16"): 0,
    ("fp8_flat", "n8"): 0,
    ("fp8_flat", "n16"): 0,
    ("fp8_656", "n8"): 32,
    ("bf16", "wide"): 0,
    ("fp8_flat", "wide"): 88,
    ("fp8_656", "wide"): 68,
}


@pytest.mark.aot
@harness.needs_ptxas
@pytest.mark.parametrize("rows", ["b1", "many"])
@pytest.mark.parametrize(("layout", "shape"), SPILLED_BYTES)
def test_mla_decode_compiled_keeps_its_registers_and_copies_no_pool(layout, shape, rows):
    tokens, heads = SHAPES[shape]
    arguments = abstract(layout, ROWS[rows], tokens, heads)
    compiled = harness.compile_h200(compiled_call(layout), *arguments)
    assert compiled.spills <= SPILLED_BYTES[layout, shape]
    assert not compiled.serialized
    for array in jax.tree.leaves(arguments[1]):
        harness.assert_no_copy(compiled.hlo, array.shape)
