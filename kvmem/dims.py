"""The dimension letters. An array's name ends in its dimensions, in order: ``hidden_BTD``, ``table_BM``.

Einsum strings and jaxtyping annotations use exactly these letters. No letter has two meanings.
"""

LETTERS: dict[str, str] = {
    "A": "entries of a list of pages",
    "B": "rows (request slots) of a batch",
    "T": "new tokens of a row in one step",
    "U": "draft tokens of a row in one step",
    "S": "cached tokens of a row (logical positions)",
    "D": "model width (hidden_size)",
    "H": "attention heads",
    "N": "width of a head's part without position (qk_nope_head_dim)",
    "R": "width of the rotary part (qk_rope_head_dim)",
    "L": "width of the compressed latent (kv_lora_rank)",
    "C": "width of one cached token, L + R",
    "Q": "width of the query's low-rank space (q_lora_rank)",
    "V": "width of a head's value (v_head_dim)",
    "J": "heads of the indexer",
    "I": "width of an index head",
    "X": "tokens that the indexer selects",
    "E": "routed experts",
    "K": "experts per token",
    "F": "width of a feed-forward layer",
    "G": "groups of weights that share a scale",
    "P": "physical pages of a pool",
    "M": "logical pages of a row",
    "Z": "tokens of a page",
    "Y": "layers that are stacked in one array",
    "W": "vocabulary",
}
