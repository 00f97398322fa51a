"""The INT4 expert kernel: one contract over implementations, shapes and loads; its routing; its limits."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import int4_inline, int4_moe, moe_route, ref, xla
from pallas_kernels.int4_moe import Config
from tests.kernels import harness

# Error of a row relative to that row. A rounding to bf16 leaves a relative error of at most 2^-8, of about
# 2^-8 / sqrt(3) * 0.72 = 1.6e-3 in the mean square over mantissas. Six independent ones reach the result:
# gate weight, up weight, hidden activation, down weight, an expert's output, the sum: sqrt(6) * 1.6e-3 =
# 4.0e-3. Rows are short here and we look at the worst of them: half as much again.
TOLERANCE = 6e-3


SMALL = Config(8, 2, 3, ctas=3)  # one of three has an item less of the first kind


@dataclasses.dataclass(frozen=True)
class Case:
    tokens: int
    experts: int
    d: int
    f: int
    choices: int
    group: int = 32
    load: str = "uniform"
    config: Config = SMALL

    def __str__(self) -> str:
        return f"t{self.tokens}-e{self.experts}-d{self.d}-f{self.f}-k{self.choices}-g{self.group}-{self.load}"


def choose_experts(case: Case, rng: np.random.Generator) -> np.ndarray:
    shape = (case.tokens, case.experts)
    if case.load == "zipf":
        score = rng.gumbel(size=shape) - 1.5 * np.log(np.arange(1, case.experts + 1))
    else:
        score = rng.random(shape)
    if case.load == "one":  # one expert gets every token, another none
        score[:, 1], score[:, 0] = 9.0, -9.0
    return np.argsort(-score, axis=1)[:, : case.choices].astype(np.int32)


@functools.cache
def make(case: Case) -> tuple:
    rng = np.random.default_rng(17)
    layers, e, d, f, g = 2, case.experts, case.d, case.f, case.group

    def ints(*shape):
        return jnp.asarray(rng.integers(-8, 8, shape), jnp.int4)

    def scales(*shape, fan):
        return jnp.asarray(rng.uniform(0.5, 1.5, shape) / (4.6 * fan**0.5), jnp.bfloat16)

    return (
        jnp.asarray(rng.standard_normal((case.tokens, d)), jnp.bfloat16),
        jnp.asarray(choose_experts(case, rng)),
        jnp.asarray(rng.dirichlet(np.ones(case.choices), case.tokens) * 2.5, jnp.float32),
        ints(layers, e, 2 * f, d),
        scales(layers, e, 2 * f, d // g, fan=d),
        ints(layers, e, d, f),
        scales(layers, e, d, f // g, fan=f),
        jnp.int32(1),
    )


def run(implementation: str, case: Case, args: tuple) -> np.ndarray:
    if implementation == "xla":
        out = jax.jit(functools.partial(xla.int4_moe, group=case.group))(*args)
    else:
        kernel = functools.partial(int4_moe.int4_moe, group=case.group, config=case.config, sim=True)
        out = harness.interpret(kernel, *args)
    assert out.dtype == jnp.bfloat16
    return np.asarray(out, np.float64)


def row_error(case: Case, args: tuple, out: np.ndarray) -> np.ndarray:
    want = ref.int4_moe(*args, group=case.group)
    return np.linalg.norm(out - want, axis=1) / np.linalg.norm(want, axis=1)


XLA_CASES = [
    Case(3, 5, 256, 128, 2),
    Case(21, 7, 512, 384, 3, load="zipf"),
    Case(17, 6, 1024, 256, 2, group=128, load="one"),
    Case(70, 9, 512, 128, 4, group=64),
]
INTERPRETED_CASES = [
    Case(3, 4, 256, 128, 2),
    Case(1, 4, 512, 128, 3, config=Config(8, 2, 3, k_splits=2, ctas=3)),  # a path of its own
    Case(11, 3, 512, 256, 2, group=64, load="one", config=Config(16, 4, 3, chunk=128, ctas=2)),
    Case(2, 3, 1024, 128, 2, group=128, load="zipf", config=Config(8, 1, 4, k_splits=4, ctas=3)),
]


@pytest.mark.parametrize(
    ("implementation", "case"),
    [("xla", case) for case in XLA_CASES] + [("interpreter", case) for case in INTERPRETED_CASES],
    ids=str,
)
def test_D12_D14_int4_moe_any_load_matches_the_oracle(implementation, case):
    args = make(case)
    assert row_error(case, args, run(implementation, case, args)).max() < TOLERANCE


MUTATIONS = {
    "gate and up swapped": lambda a: (*a[:3], jnp.roll(a[3], a[3].shape[2] // 2, 2), *a[4:]),
    "stale scale": lambda a: (*a[:4], jnp.roll(a[4], 1, 3), *a[5:]),
    "stale down scale": lambda a: (*a[:6], jnp.roll(a[6], 1, 3), a[7]),
    "shifted expert": lambda a: (a[0], (a[1] + 1) % a[3].shape[1], *a[2:]),
    "zero weights": lambda a: (*a[:3], jnp.zeros_like(a[3]), *a[4:]),
    "nibble order": lambda a: (
        *a[:3],
        a[3].reshape(*a[3].shape[:3], -1, 2)[..., ::-1].reshape(a[3].shape),
        *a[4:],
    ),
    "another layer": lambda a: (*a[:7], jnp.int32(0)),
    "router weight of the next choice": lambda a: (*a[:2], jnp.roll(a[2], 1, 1), *a[3:]),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_int4_moe_mutated_input_exceeds_the_tolerance(name):
    case = XLA_CASES[0]
    args = make(case)
    assert row_error(case, args, run("xla", case, MUTATIONS[name](args))).min() > 5 * TOLERANCE


def test_D11_int4_moe_large_activations_stay_finite():
    case = Case(3, 4, 256, 128, 2)
    args = make(case)
    args = ((args[0].astype(jnp.float32) * 1e9).astype(jnp.bfloat16), *args[1:])
    for implementation in ("xla", "interpreter"):
        out = run(implementation, case, args)
        assert np.isfinite(out).all()
        assert row_error(case, args, out).max() < TOLERANCE


def test_int4_moe_zero_group_gives_exact_zero():
    case = XLA_CASES[0]
    args = list(make(case))
    args[3], args[5] = jnp.zeros_like(args[3]), jnp.zeros_like(args[5])
    np.testing.assert_array_equal(run("xla", case, tuple(args)), 0.0)


def test_permute_k_equals_the_words_of_a_register_fragment():
    """Every value -8..7, taken from packed bytes the way a warp does, lands where permute_k says."""
    values = np.random.default_rng(3).permutation(np.tile(np.arange(-8, 8), 8)).reshape(1, 128)
    nibbles = (values & 15).reshape(-1, 8)
    words = sum(nibbles[:, i].astype(np.uint32) << (4 * i) for i in range(8)).reshape(4, 4)  # [t, w]
    got = np.empty(128)
    for t, w, i in np.ndindex(4, 4, 4):
        pair = ((int(words[t, w]) >> (4 * i)) & 0x000F000F) ^ 0x43084308
        halves = np.asarray([pair & 0xFFFF, pair >> 16], np.uint16).view(jnp.bfloat16).astype(np.float64)
        got[32 * w + 8 * i + 2 * t :][:2] = halves - 136
    np.testing.assert_array_equal(int4_inline.permute_k(jnp.asarray(values, jnp.float32))[0], got)


@pytest.mark.parametrize(
    ("case", "tokens"),
    [
        (Case(1, 9, 0, 0, 4), 8),
        (Case(13, 7, 0, 0, 3, load="one"), 8),
        (Case(41, 5, 0, 0, 3, load="zipf"), 16),
    ],
    ids=["one token", "one expert gets all", "zipf"],
)
def test_route_covers_every_slot_once(case, tokens):
    expert_TK = choose_experts(case, np.random.default_rng(5))
    routing = moe_route.route(jnp.asarray(expert_TK), 2, num_experts=case.experts, tokens=tokens)
    token, block, position = map(np.asarray, routing)
    count = block[3, 0]
    assert (block[3] == count).all()
    assert count == sum(-(-n // tokens) for n in np.bincount(expert_TK.ravel()))
    seen = []
    for owner, first, size in block[:3, :count].T:
        assert 0 < size <= tokens
        for slot in range(first, first + size):
            choice = np.flatnonzero(position[token[slot]] == slot)
            assert expert_TK[token[slot], choice] + 2 * case.experts == owner
            seen.append((token[slot], choice.item()))
    assert sorted(seen) == sorted(np.ndindex(*expert_TK.shape))


BAD = {
    "group": ({"group": 16}, NotImplementedError, "group 16"),
    "group of the scales": ({"group": 64}, ValueError, "s_gate_up"),
    "block": ({"config": Config(12)}, ValueError, "blocks of 12"),
    "rows": ({"config": Config(8, 3, 3)}, ValueError, "items of 192"),
    "k": ({"config": Config(8, 1, 3, k_splits=3)}, ValueError, "3 parts"),
    "stages": ({"config": Config(8, 1, 2)}, ValueError, "stages"),
    "chunk": ({"config": Config(8, 1, 3, chunk=64)}, ValueError, "chunk=64"),
    "memory": ({"config": Config(8, 2, 40)}, ValueError, "shared memory"),
}


@pytest.mark.parametrize("name", BAD)
def test_int4_moe_wrong_argument_raises(name):
    changed, error, message = BAD[name]
    with pytest.raises(error, match=re.escape(message)):
        int4_moe.int4_moe(*make(Case(3, 4, 256, 128, 2)), **{"group": 32, **changed})


MODELS = {"kimi": (384, 7168), "glm": (256, 6144)}
BATCHES = (1, 8, 64, 256, 1024, 4096)


def rank_shapes(model: str, tokens: int, group: int, f: int = 256) -> tuple:
    """One rank of TP = 8 at full size, a stack of three layers."""
    e, d = MODELS[model]
    struct = jax.ShapeDtypeStruct
    return (
        struct((tokens, d), jnp.bfloat16),
        struct((tokens, 8), jnp.int32),
        struct((tokens, 8), jnp.float32),
        struct((3, e, 2 * f, d), jnp.int4),
        struct((3, e, 2 * f, d // group), jnp.bfloat16),
        struct((3, e, d, f), jnp.int4),
        struct((3, e, d, f // group), jnp.bfloat16),
        struct((), jnp.int32),
    )


@pytest.mark.parametrize("tokens", BATCHES)
@pytest.mark.parametrize(("model", "group"), [("kimi", 32), ("glm", 128)])
def test_int4_moe_tuned_config_lowers_for_cuda(model, group, tokens):
    kernel = functools.partial(int4_moe.int4_moe, group=group)
    text = harness.lower(kernel, *rank_shapes(model, tokens, group)).as_text()
    assert "mosaic_gpu" in text


@pytest.mark.aot
@harness.needs_ptxas
@pytest.mark.parametrize("tokens", BATCHES)
@pytest.mark.parametrize(("model", "group"), [("kimi", 32), ("glm", 32), ("glm", 128)])
def test_int4_moe_tuned_config_compiles_without_spills_or_copies(model, group, tokens):
    shapes = rank_shapes(model, tokens, group)
    compiled = harness.compile_h200(functools.partial(int4_moe.int4_moe, group=group), *shapes)
    assert compiled.spills == 0
    for stack in shapes[3:7]:
        harness.assert_no_copy(compiled.hlo, stack.shape)
        harness.assert_no_copy(compiled.hlo, (stack.shape[0] * stack.shape[1], *stack.shape[2:]))
