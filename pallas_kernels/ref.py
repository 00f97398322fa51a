"""Float32 oracles for tests only. They share no code with ``xla.py`` or with the kernels."""

import ml_dtypes
import numpy as np


def int4_moe(
    x_TD, expert_TK, weight_TK, w_gate_up, s_gate_up, w_down, s_down, layer, *, group: int
) -> np.ndarray:
    """[T, D] f64: each token's experts one by one, on the unrounded product of integer and scale."""

    def dense(w, s):
        return np.asarray(w, np.float64) * np.repeat(np.asarray(s, np.float64), group, axis=-1)

    x_TD, expert_TK, weight_TK = (
        np.asarray(x_TD, np.float64),
        np.asarray(expert_TK),
        np.asarray(weight_TK, np.float64),
    )
    up_EFD = dense(w_gate_up[layer], s_gate_up[layer])
    down_EDF = dense(w_down[layer], s_down[layer])
    features = down_EDF.shape[2]
    out_TD = np.zeros_like(x_TD)
    for t, k in np.ndindex(*expert_TK.shape):
        both = up_EFD[expert_TK[t, k]] @ x_TD[t]
        gate, up = both[:features], both[features:]
        hidden = gate * (0.5 + 0.5 * np.tanh(gate / 2)) * up
        out_TD[t] += weight_TK[t, k] * (down_EDF[expert_TK[t, k]] @ hidden)
    return out_TD


def mla_pool(values, scales=None, rope=None, scale=1.0) -> np.ndarray:
    """A raw-bit pool as f64 latents [Y, P, Z, 576]; see ``mla_decode.Pool`` for the layouts."""
    values = np.asarray(values)
    if values.dtype == np.uint16:
        return values.view(ml_dtypes.bfloat16).astype(np.float64)
    latent = values.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    if scales is None:
        return latent * float(scale)
    latent = latent * np.repeat(np.asarray(scales, np.float64), 128, axis=-1)
    return np.concatenate([latent, np.asarray(rope).view(ml_dtypes.bfloat16).astype(np.float64)], axis=-1)


def mla_decode(q_BTHC, pool_YPZC, layer, table_BM, length_B, *, softmax_scale, num_new_B=None):
    """Attention row by row and token by token in f64: (output [B, T, H, 512], log-sum-exp [B, T, H])."""
    q_BTHC = np.asarray(q_BTHC).astype(np.float64)
    rows, tokens, heads, _ = q_BTHC.shape
    page = pool_YPZC.shape[2]
    out = np.zeros((rows, tokens, heads, 512))
    lse = np.full((rows, tokens, heads), -np.inf)
    for b in range(rows):
        length = int(length_B[b])
        new = tokens if num_new_B is None else int(num_new_B[b])
        cached = [pool_YPZC[layer, table_BM[b, i // page], i % page] for i in range(length)]
        for t in range(tokens):
            seen = min(length, length - new + t + 1)
            if seen <= 0:
                continue
            k = np.stack(cached[:seen])
            for h in range(heads):
                score = k @ q_BTHC[b, t, h] * softmax_scale
                weight = np.exp(score - score.max())
                out[b, t, h] = weight @ k[:, :512] / weight.sum()
                lse[b, t, h] = score.max() + np.log(weight.sum())
    return out, lse
