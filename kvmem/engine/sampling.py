"""Sampling on the device, a row at a time: no row's token depends on any other row.

The token at position p of a request is drawn with ``fold_in(key(seed), p)``: the same whatever else is in the
batch, in whichever row it runs, and however often it was moved out and back.
"""

import typing

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int, UInt32

from kvmem.engine.request import SamplingParams


@typing.no_type_check
@struct.dataclass
class SamplerRows:
    """Sampling parameters of every row; see SamplingParams. Greedy rows have temperature 0."""

    temperature_B: Float[Array, "B"]
    top_k_B: Int[Array, "B"]
    top_p_B: Float[Array, "B"]
    min_p_B: Float[Array, "B"]
    seed_B: UInt32[Array, "B"]


@typing.no_type_check
@struct.dataclass
class Sampled:
    """Chosen tokens, their log-probabilities in nats, and whether a row's logits allowed a choice at all."""

    token_B: Int[Array, "B"]
    logprob_B: Float[Array, "B"]
    finite_B: Bool[Array, "B"]


def init(num_rows: int) -> SamplerRows:
    """Greedy rows."""
    return SamplerRows(
        temperature_B=jnp.zeros(num_rows, jnp.float32),
        top_k_B=jnp.zeros(num_rows, jnp.int32),
        top_p_B=jnp.ones(num_rows, jnp.float32),
        min_p_B=jnp.zeros(num_rows, jnp.float32),
        seed_B=jnp.zeros(num_rows, jnp.uint32),
    )


def one_row(sampling: SamplingParams) -> tuple[float, int, float, float, int]:
    """A request's parameters in the order of SamplerRows' fields."""
    s = sampling
    return float(s.temperature), s.top_k, float(s.top_p), float(s.min_p), s.seed


@jax.named_scope("sample")
def sample(logits_BW: Float[Array, "B W"], rows: SamplerRows, position_B: Int[Array, "B"]) -> Sampled:
    """Draws one token for each row.

    Args:
      logits_BW: f32. A row that holds NaN or +inf, or nothing but -inf, is flagged and gets token 0.
      rows: sampling parameters.
      position_B: position of the new token in its sequence, folded into the row's key.

    Returns:
      Tokens; log-probabilities under the unfiltered, unscaled distribution; ``finite_B``.
    """
    finite_B = ~jnp.any(jnp.isnan(logits_BW) | jnp.isposinf(logits_BW), axis=1)
    finite_B &= jnp.any(logits_BW > -jnp.inf, axis=1)
    safe_BW = jnp.where(finite_B[:, None], logits_BW, 0.0)
    greedy_B = jnp.argmax(safe_BW, axis=1).astype(jnp.int32)
    random_B = rows.temperature_B > 0

    def draw() -> Int[Array, "B"]:
        scaled_BW = safe_BW / jnp.where(random_B, rows.temperature_B, 1.0)[:, None]
        drawn_B = jax.vmap(_draw)(_filter(scaled_BW, rows), rows.seed_B, position_B)
        return jnp.where(random_B, drawn_B, greedy_B)

    token_B = jax.lax.cond(jnp.any(random_B), draw, lambda: greedy_B)
    token_B = jnp.where(finite_B, token_B, 0)
    chosen_B = jnp.take_along_axis(jax.nn.log_softmax(safe_BW, axis=1), token_B[:, None], axis=1)[:, 0]
    return Sampled(token_B=token_B, logprob_B=chosen_B, finite_B=finite_B)


def _draw(logits_W: Float[Array, "W"], seed: UInt32[Array, ""], position: Int[Array, ""]) -> Int[Array, ""]:
    key = jax.random.fold_in(jax.random.key(seed), position)
    return jax.random.categorical(key, logits_W).astype(jnp.int32)


def _filter(logits_BW: Float[Array, "B W"], rows: SamplerRows) -> Float[Array, "B W"]:
    """Sets logits outside top-k, top-p and min-p to -inf. Ties at a threshold are kept; the best always
    is.
    """
    sorted_BW = jnp.flip(jnp.sort(logits_BW, axis=1), axis=1)
    vocab = logits_BW.shape[1]
    k_B = jnp.where(rows.top_k_B > 0, jnp.minimum(rows.top_k_B, vocab), vocab)
    k_th_B1 = jnp.take_along_axis(sorted_BW, k_B[:, None] - 1, axis=1)
    in_k_BW = jnp.arange(vocab)[None, :] < k_B[:, None]
    probability_BW = jax.nn.softmax(jnp.where(in_k_BW, sorted_BW, -jnp.inf), axis=1)
    # A token is in the nucleus while those before it have not reached top_p.
    before_BW = jnp.cumsum(probability_BW, axis=1) - probability_BW
    count_B1 = jnp.sum((before_BW < rows.top_p_B[:, None]) & in_k_BW, axis=1, keepdims=True)
    p_th_B1 = jnp.take_along_axis(sorted_BW, jnp.maximum(count_B1, 1) - 1, axis=1)
    min_B1 = sorted_BW[:, :1] + jnp.log(rows.min_p_B)[:, None]
    threshold_B1 = jnp.maximum(jnp.maximum(k_th_B1, p_th_B1), min_B1)
    return jnp.where(logits_BW >= threshold_B1, logits_BW, -jnp.inf)
