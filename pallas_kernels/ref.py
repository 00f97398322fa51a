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


def mla_pool(values, scales=None, rope=None, *, scale=1.0) -> np.ndarray:
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
        position = np.arange(length)
        cached = pool_YPZC[layer, np.asarray(table_BM)[b, position // page], position % page]
        for t in range(tokens):
            seen = min(length, length - new + t + 1)
            if seen <= 0:
                continue
            score = q_BTHC[b, t] @ cached[:seen].T * softmax_scale
            peak = score.max(axis=1, keepdims=True)
            weight = np.exp(score - peak)
            out[b, t] = weight @ cached[:seen, :512] / weight.sum(axis=1, keepdims=True)
            lse[b, t] = peak[:, 0] + np.log(weight.sum(axis=1))
    return out, lse


def mla_case(layout: str, tokens: int, heads: int, lengths, *, flat_scale: float, seed: int = 0) -> dict:
    """Hostile input of ``mla_decode`` as numpy arrays: q, pool, layer, table, length, num_new.

    Pages are in random order, the last two rows share their first page, and whatever no row wrote, page 0
    included, holds NaN. Scales of fp8_656 spread over several powers of two.
    """
    rng = np.random.default_rng(seed)
    layers, page = 3, 64
    need = [-(-n // page) for n in lengths]
    pages = sum(need) + 5
    table = np.zeros((len(lengths), max(need) + 2), np.int32)
    free = rng.permutation(np.arange(1, pages))
    unwritten = np.ones((pages, page), bool)
    for b, n in enumerate(need):
        table[b, :n], free = free[:n], free[n:]
    table[-1, 0] = table[-2, 0]
    for b, n in enumerate(lengths):
        for position in range(n):
            unwritten[table[b, position // page], position % page] = False
    latent = rng.standard_normal((layers, pages, page, 576)).astype(np.float32)

    def bits(x, dtype, stored, nan):
        raw = x.astype(dtype).view(stored).copy()
        raw[:, unwritten] = nan
        return raw

    bf16 = (ml_dtypes.bfloat16, np.uint16, 0x7FFF)
    e4m3 = (ml_dtypes.float8_e4m3fn, np.uint8, 0x7F)
    pool: tuple
    if layout == "bf16":
        pool = (bits(latent, *bf16), None, None)
    elif layout == "fp8_flat":
        pool = (bits(latent / flat_scale, *e4m3), None, None)
    else:
        groups = latent[..., :512].reshape(layers, pages, page, 4, 128)
        groups = groups * np.exp2(rng.integers(-3, 3, (layers, pages, page, 4, 1))).astype(np.float32)
        scales = (np.abs(groups).max(-1) / 448).astype(np.float32)
        values = bits((groups / scales[..., None]).reshape(layers, pages, page, 512), *e4m3)
        scales[:, unwritten] = np.nan
        pool = (values, scales, bits(latent[..., 512:], *bf16))
    q = rng.standard_normal((len(lengths), tokens, heads, 576)).astype(ml_dtypes.bfloat16)
    new = np.minimum(np.asarray(lengths), rng.integers(1, tokens + 1, len(lengths))).astype(np.int32)
    length = np.asarray(lengths, np.int32)
    return {"q": q, "pool": pool, "layer": 1, "table": table, "length": length, "num_new": new}


PROLOGUE_FIRST, PROLOGUE_PAGES, PROLOGUE_EPSILON = 24, 5, 1e-5
# A flat scale at which a few values of every token are clipped.
PROLOGUE_SCALE = 0.011


def mla_prologue_case(layout: str, tokens: int, heads: int, nope: int) -> dict:
    """Hostile input of ``mla_prologue`` as numpy arrays: clipped values, NaN, infinity, a dead row, a page
    outside of the pool, and a pool of other bytes, so that a write in a wrong place shows.

    Latents are small whole numbers: their squares add up exactly in any order.
    """
    rng = np.random.default_rng(tokens)
    bf16 = ml_dtypes.bfloat16
    compressed = rng.standard_normal((tokens, 1, PROLOGUE_FIRST + 576 + 8))
    compressed[:, :, PROLOGUE_FIRST : PROLOGUE_FIRST + 512] = rng.integers(-9, 10, (tokens, 1, 512))
    rope = compressed[:, 0, PROLOGUE_FIRST + 512 :]
    rope[0] *= 1e4
    rope[1 % tokens, 2], rope[2 % tokens, 8] = np.nan, np.inf
    page = np.arange(tokens) % (PROLOGUE_PAGES - 1) + 1
    page[tokens // 2] = 0 if tokens > 1 else page[0]
    page[-1] = PROLOGUE_PAGES if tokens > 3 else page[-1]
    widths = {"bf16": 576, "fp8_flat": 576, "fp8_656": 512}
    pool: dict = {"values": (widths[layout], np.uint16 if layout == "bf16" else np.uint8)}
    if layout == "fp8_656":
        pool |= {"scales": (4, np.float32), "rope": (64, np.uint16)}
    shape = (2, PROLOGUE_PAGES, 64)
    filled = {name: rng.integers(1, 100, (*shape, w)).astype(dtype) for name, (w, dtype) in pool.items()}
    for array in filled.values():
        array[:, 0] = 0
    return {
        "q": rng.standard_normal((tokens, 1, heads, nope + 64)).astype(bf16),
        "compressed": compressed.astype(bf16),
        "norm": rng.standard_normal((3, 512)).astype(bf16),
        "w_uk": rng.standard_normal((3, heads, nope, 512)).astype(bf16),
        "weights_layer": 2,
        "pool": filled,
        "layer": 1,
        "page": page.astype(np.int32)[:, None],
        "offset": ((7 * (np.arange(tokens) // (PROLOGUE_PAGES - 1)) + 3) % 64).astype(np.int32)[:, None],
        "angle": rng.uniform(0, 100, (tokens, 1, 32)).astype(np.float32),
    }


def mla_prologue(case: dict, layout: str) -> tuple[np.ndarray, dict, np.ndarray]:
    """(query [T, 1, H, 576] f64, pool, [clipped, not finite]) of a ``mla_prologue_case``, token by token."""
    pool = {name: array.copy() for name, array in case["pool"].items()}
    counts = np.zeros(2, np.int64)
    tokens, nope = len(case["q"]), case["w_uk"].shape[2]
    query = np.zeros((tokens, 1, case["q"].shape[2], 576))
    f32, bf16, e4m3 = np.float32, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn

    def rounded(x):
        return np.asarray(x, f32).astype(bf16).astype(f32)

    def rotated(x, angle):
        cos, sin = np.cos(angle, dtype=f32), np.sin(angle, dtype=f32)
        even, odd = x[..., 0::2].astype(f32), x[..., 1::2].astype(f32)
        out = np.zeros(x.shape, f32)
        out[..., 0::2], out[..., 1::2] = even * cos - odd * sin, odd * cos + even * sin
        return rounded(out)

    def stored(x, scale, most, narrow, bits):
        finite = np.isfinite(x)
        scaled = (np.where(finite, x, 0) / f32(scale)).astype(f32)
        clipped = np.clip(scaled, -most, most)
        counts[:] += [np.sum(clipped != scaled), np.sum(~finite)]
        return clipped.astype(narrow).view(bits)

    in_bf16 = (1.0, float(ml_dtypes.finfo(bf16).max), bf16, np.uint16)
    in_e4m3 = (448.0, e4m3, np.uint8)
    for n in range(tokens):
        angle = case["angle"][n, 0]
        query[n, 0, :, 512:] = rotated(case["q"][n, 0, :, nope:], angle)
        for head, q in enumerate(case["q"][n, 0, :, :nope].astype(np.float64)):
            query[n, 0, head, :512] = q @ case["w_uk"][case["weights_layer"], head].astype(np.float64)
        token = case["compressed"][n, 0, PROLOGUE_FIRST:]
        latent = token[:512].astype(f32)
        factor = f32(1) / np.sqrt(np.mean(latent * latent, dtype=f32) + f32(PROLOGUE_EPSILON))
        latent = rounded(rounded(latent * factor) * case["norm"][case["weights_layer"]].astype(f32))
        key = rotated(token[512:576], angle)
        if not 0 < case["page"][n, 0] < PROLOGUE_PAGES:
            continue
        at = (case["layer"], case["page"][n, 0], case["offset"][n, 0])
        if layout == "fp8_656":
            scale = np.abs(latent).reshape(4, 128).max(1) * (f32(1) / f32(448))  # as XLA divides
            pool["scales"][at] = scale
            pool["values"][at] = stored(latent, np.repeat(scale, 128), *in_e4m3)
            pool["rope"][at] = stored(key, *in_bf16)
        else:
            how = in_bf16 if layout == "bf16" else (PROLOGUE_SCALE, *in_e4m3)
            pool["values"][at] = stored(np.concatenate([latent, key]), *how)
    return query, pool, counts
