"""Verification of draft tokens: the tokens of plain decode for any drafts, behind the same check."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvmem import models
from kvmem.cache import pages, store
from kvmem.engine import step
from kvmem.engine.step import Cause, StepConfig
from kvmem.models import decoder, params

ROWS, COLUMNS, PAGE_SIZE, DRAFTS, NEW = 3, 9, 4, 5, 12
PROMPTS = [(5, 6, 7, 8, 9, 10, 11), (21, 22, 23), (31, 32, 33, 34, 35)]
TEMPERATURES = [0.0, 0.9, 0.0]
QUICK = {"xla_backend_optimization_level": 0}
EVERY = jnp.ones(ROWS, bool)


def _config(name: str, detector: str = "tags") -> StepConfig:
    return StepConfig(models.get_config(name), ROWS, COLUMNS, detector)


@functools.cache
def _weights(name):
    return params.init_params(models.get_config(name), "f32", 0)


@functools.cache
def _program(body, config):
    return jax.jit(functools.partial(body, config=config), compiler_options=QUICK)


@functools.cache
def _prefilled(name, detector="tags"):
    """A pool whose rows hold their prompts, and the first token of each; row 1 samples."""
    config = _config(name, detector)
    state = step.init(
        decoder.cache_shape(config.model),
        cache="f32_576",
        index="index_f32" if config.model.indexer else None,
        scale=1.0,
        num_pages=ROWS * COLUMNS + 1,
        num_rows=ROWS,
        max_pages=COLUMNS,
        page_size=PAGE_SIZE,
        detector=detector,
    )
    sampler = dataclasses.replace(state.sampler, temperature_B=jnp.asarray(TEMPERATURES))
    state = dataclasses.replace(state, cause_B=jnp.zeros(ROWS, jnp.int32), sampler=sampler)
    run = _program(step._decode, config)
    for at in range(max(map(len, PROMPTS))):  # as decode steps: one program less to compile
        run_B = jnp.asarray([at < len(prompt) for prompt in PROMPTS])
        fed_B = jnp.asarray([prompt[min(at, len(prompt) - 1)] for prompt in PROMPTS], jnp.int32)
        fed = dataclasses.replace(state, token_B=jnp.where(run_B, fed_B, state.token_B))
        state, report = run(_weights(name), fed, run_B)
        assert step.read(report).ran == run_B.tolist()
    return state


@functools.cache
def _decoded(name):
    """NEW tokens of each row by plain decode, and the pool after them."""
    state, tokens = _prefilled(name), []
    run = _program(step._decode, _config(name))
    for _ in range(NEW):
        state, report = run(_weights(name), state, EVERY)
        tokens.append(step.read(report).token)
    return np.asarray(tokens).T, state


def _drafts(kind, expected_BT, made_B, turn):
    """Guesses of the next tokens, and how many of them each row is given."""
    rng = np.random.default_rng(turn)
    padded_BT = np.pad(expected_BT, ((0, 0), (0, DRAFTS)))
    right_BU = np.stack([padded_BT[row, made : made + DRAFTS] for row, made in enumerate(made_B)])
    wrong_BU = (right_BU + 1) % 97
    count_B = np.full(ROWS, DRAFTS)
    if kind == "right":
        draft_BU = right_BU
    elif kind == "wrong":
        draft_BU = wrong_BU
    else:  # right up to one token, right again behind it; another number for each row, none for some
        draft_BU = right_BU.copy()
        at_B = rng.integers(DRAFTS, size=ROWS)
        draft_BU[range(ROWS), at_B] = wrong_BU[range(ROWS), at_B]
        count_B = rng.integers(DRAFTS + 1, size=ROWS)
    left_B = NEW - np.asarray(made_B)
    return draft_BU.astype(np.int32), np.minimum(count_B, np.maximum(left_B - 1, 0)).astype(np.int32)


def _speculate(name, kind, detector="tags", body=step._verify):
    """NEW tokens of each row by verify steps; also how many steps that took, and the pool."""
    expected_BT, _ = _decoded(name)
    state, tokens, steps = _prefilled(name, detector), [[] for _ in range(ROWS)], 0
    run = _program(body, _config(name, detector))
    while min(map(len, tokens)) < NEW and steps < 2 * NEW:
        made_B = [len(row) for row in tokens]
        draft_BU, count_B = _drafts(kind, expected_BT, made_B, steps)
        run_B = jnp.asarray([made < NEW for made in made_B])
        state, report = run(_weights(name), state, draft_BU, run_B, count_B)
        assert pages.violations(state.pages) == []
        for row, count in enumerate(report.count_B.tolist()):
            tokens[row] += report.token_BT[row, :count].tolist()
        steps += 1
    return np.asarray([row[:NEW] for row in tokens if len(row) >= NEW]), steps, state


POOLS = [
    pytest.param("kimi_tiny_parity", "tags", id="kimi"),
    pytest.param("kimi_tiny_parity", "tags_digest", id="kimi_digest", marks=pytest.mark.slow),
    pytest.param("glm_tiny_parity", "tags", id="glm", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "detector"), POOLS)
@pytest.mark.parametrize("kind", ["right", "wrong", "mixed"])
def test_verify_any_drafts_gives_the_tokens_of_plain_decode(name, detector, kind):
    expected_BT, plain = _decoded(name)
    tokens_BT, steps, state = _speculate(name, kind, detector)
    np.testing.assert_array_equal(tokens_BT, expected_BT)
    if kind != "mixed":
        assert steps == {"right": NEW // (DRAFTS + 1), "wrong": NEW}[kind]
    assert state.cause_B.tolist() == [Cause.OK] * ROWS
    np.testing.assert_array_equal(state.pages.length_B, plain.pages.length_B)
    table_BM = state.pages.table_BM
    got, want = (
        store.gather_latent(s.kv, 1, s.pages.table_BM, jnp.float32, s.pages.length_B) for s in (state, plain)
    )
    # f32 sums over at most 96 terms in another order: a rejected guess leaves nothing behind.
    np.testing.assert_allclose(got, want, atol=2e-5)
    assert bool(jnp.all(table_BM[:, 0] > 0))


def _accepts_behind_a_wrong_guess(monkeypatch):
    monkeypatch.setattr(jnp, "cumprod", lambda x, axis: x)


def _keeps_rejected_tokens(monkeypatch):
    monkeypatch.setattr(pages, "truncate", lambda state, length_B, mask_B: (state, mask_B))


@pytest.mark.slow
@pytest.mark.parametrize("mutate", [_accepts_behind_a_wrong_guess, _keeps_rejected_tokens])
def test_verify_mutated_gives_other_tokens(monkeypatch, mutate):
    expected_BT, _ = _decoded("kimi_tiny_parity")
    mutate(monkeypatch)
    anew = functools.partial(step._verify)  # another program than the one that is compiled already
    tokens_BT, _, _ = _speculate("kimi_tiny_parity", "mixed", body=anew)
    assert not np.array_equal(tokens_BT, expected_BT)


def _swapped(state):
    """Row 1's two first pages change places in the table."""
    table_BM = state.pages.table_BM.at[2, :2].set(state.pages.table_BM[2, 1::-1])
    return dataclasses.replace(state, pages=dataclasses.replace(state.pages, table_BM=table_BM))


def _flipped(state):
    values = state.kv.values.at[0, state.pages.table_BM[2, 0], 1, 3].multiply(-1.0)
    return dataclasses.replace(state, kv=dataclasses.replace(state.kv, values=values))


@pytest.mark.parametrize(
    ("fault", "detector", "stopped"),
    [
        pytest.param(_swapped, "tags", True, id="pages_in_wrong_order"),
        pytest.param(_flipped, "tags_digest", True, id="flipped_bit", marks=pytest.mark.slow),
        pytest.param(_swapped, "off", False, id="mutation_without_the_check"),
    ],
)
def test_verify_damaged_row_is_stopped_before_it_reads_and_writes(fault, detector, stopped):
    name = "kimi_tiny_parity"
    run = _program(step._verify, _config(name, detector))
    expected_BT, _ = _decoded(name)
    draft_BU, count_B = _drafts("right", expected_BT, [0] * ROWS, 0)
    pool = _prefilled(name, "tags" if detector == "off" else detector)
    before = fault(pool)
    clean, told = run(_weights(name), pool, draft_BU, EVERY, count_B)
    after, report = run(_weights(name), before, draft_BU, EVERY, count_B)
    assert told.count_B.tolist() == [DRAFTS + 1] * ROWS
    assert (report.count_B[2] == 0) == stopped
    assert (after.cause_B[2] == Cause.INTEGRITY) == stopped
    mine_M = before.pages.table_BM[2, :2]
    same = np.array_equal(after.kv.values[:, mine_M], before.kv.values[:, mine_M])
    assert same == stopped
    for row in (0, 1):  # bit for bit
        np.testing.assert_array_equal(report.token_BT[row], told.token_BT[row])
        np.testing.assert_array_equal(report.logprob_BT[row], told.logprob_BT[row])
        theirs_M = clean.pages.table_BM[row, :3]
        np.testing.assert_array_equal(after.kv.values[:, theirs_M], clean.kv.values[:, theirs_M])
    later, report = run(_weights(name), after, draft_BU, EVERY, count_B)  # launched before the host heard
    assert (report.count_B[2] == 0) == stopped
    assert later.pages.length_B[0] > clean.pages.length_B[0]
