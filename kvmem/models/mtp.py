"""GLM's multi-token-prediction layer (layer 78): one more decoder layer that guesses the token after next.

``z_t = [rms(embed(x_{t+1})) ; rms(h_t)] W_eh``, the embedding's half first, with h_t the main model's hidden
state after its final norm; then a full MoE layer with its own indexer and its own cache layer, a norm, and
the main model's head. (deepseek_nextn of SGLang; transformers drops this layer: there is no reference.)
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kvmem.cache import store
from kvmem.models import attention, decoder, layers
from kvmem.models.attention import Form, Implementation
from kvmem.models.config import ModelConfig
from kvmem.models.decoder import Kind, Stand, StepBatch
from kvmem.models.params import Params


def draft(
    params: Params,
    config: ModelConfig,
    kv: store.KVStore,
    batch: StepBatch,
    hidden_BTD: Float[Array, "B T D"],
    selection_BTS: Bool[Array, "B T S"] | None = None,
    *,
    form: Form = "absorbed",
    implementation: Implementation = "xla",
    axis: str | None = None,
) -> tuple[Float[Array, "B T W"], Float[Array, "B T D"], store.KVStore, Bool[Array, "B T S"]]:
    """One draft step.

    Args:
      kv: a cache with the MTP layer, ``decoder.cache_shape(config, mtp=True)``.
      batch: at each position t the *next* token x_{t+1}; lengths, pages and positions are those of t.
      hidden_BTD: ``decoder.backbone``'s h_t at these positions, in a further draft step this function's own.
      selection_BTS: of an earlier draft step's last token, [B, 1, S], to be reused in a step of one token
        (``index_share_for_mtp_iteration``); the token's own position is added to it.

    Returns:
      f32 logits for x_{t+2}, the hidden state for a further draft step, the cache, and the selection.

    Raises:
      ValueError: a model or a cache without an MTP layer.
    """
    if config.mtp_layers != 1 or "mtp" not in params:
        raise ValueError(
            f"{config.name}: mtp_layers={config.mtp_layers}, drafting needs one and its parameters"
        )
    if kv.shape.num_layers != config.num_layers + 1:
        raise ValueError(f"a cache of {kv.shape.num_layers} layers has no room for the MTP layer")
    own = params["mtp"]
    at = attention.place(
        batch.num_new_B, batch.length_B, batch.table_BM, batch.tokens_BT.shape[1], kv.page_size
    )
    embedded_BTD = decoder.embed(params, batch.tokens_BT, axis)
    joined = jnp.concatenate(
        [
            layers.rmsnorm(embedded_BTD, own["embed_norm"][0], config.rms_norm_eps),
            layers.rmsnorm(hidden_BTD, own["hidden_norm"][0], config.rms_norm_eps),
        ],
        axis=-1,
    )
    z_BTD = layers.linear(joined, own["eh_proj"][0])
    allowed_BTS = attention.visible(at, batch.table_BM.shape[1] * kv.page_size)
    if selection_BTS is not None:
        position_11S = jnp.arange(selection_BTS.shape[2])[None, None, :]
        allowed_BTS &= selection_BTS | (position_11S == at.position_BT[:, :, None])
    shared = None
    if implementation == "mosaic":
        heads = own["attention"]["w_uk"].shape[1]
        shared = attention.kernel_step(config, kv, at, heads, form)
    kind = Kind(dense=False, full_indexer=config.indexer is not None and selection_BTS is None)
    stand = Stand(0, 0, 0, config.num_layers, config.num_index_layers)
    norm_YD = jnp.concatenate([own["attention"]["input_norm"], own["head_norm"]])
    (_, out_BTD), kv, allowed_BTS = decoder.decoder_layer(
        own,
        config,
        at,
        kind,
        stand,
        decoder.Stream(z_BTD, layers.rmsnorm(z_BTD, norm_YD[0], config.rms_norm_eps)),
        kv,
        allowed_BTS,
        norm_YD=norm_YD,
        form=form,
        implementation=implementation,
        join=layers.joiner(axis, "nccl", z_BTD.shape, config.rms_norm_eps),
        shared=shared,
    )
    return decoder.head(params, out_BTD, axis), out_BTD, kv, allowed_BTS
