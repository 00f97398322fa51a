"""Float32 oracles for tests only. They share no code with ``xla.py`` or with the kernels."""

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
