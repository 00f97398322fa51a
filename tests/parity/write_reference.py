"""Writes tiny random checkpoints and the logits that transformers computes from them.

Imports torch, transformers and the standard library only, so that it runs in an environment without this
project (``make parity`` builds one):

    python write_reference.py --out DIR --seed 0 [--cases kimi glm kimi_epsilon glm_epsilon]

Each case is a Hugging Face directory as ``save_pretrained`` lays it out, plus ``reference.safetensors``
(``tokens_<i>`` i32 [T] and ``logits_<i>`` f32 [T, vocabulary] of each prompt) and ``reference.json`` (the
seed, the margin, the versions). Weights are exact in bf16 and saved as bf16, the router's bias as f32, as
published; logits are computed in f32 with eager attention and eager experts.

transformers initialises norms to 1 and the router's bias to 0, which would hide mistakes: everything is
redrawn here. A selection (experts, groups, indexed tokens) that rests on a difference below 1e-4 would not
survive another order of summation, so such a seed is skipped and the next one tried.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import pathlib
import struct

import torch
import transformers

MARGIN = 1e-4
PROMPT_LENGTHS = (41, 33, 12, 3)
VOCABULARY = 97

COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 80,
    "moe_intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 94,
    "eos_token_id": 95,
    "pad_token_id": 96,
    "attn_implementation": "eager",
    "experts_implementation": "eager",
}


def kimi() -> transformers.PreTrainedModel:
    """DeepSeek-V3 as Kimi uses it, with two expert groups (Kimi has one): the general path is run."""
    config = transformers.DeepseekV3Config(
        **COMMON,
        num_hidden_layers=3,
        first_k_dense_replace=1,
        v_head_dim=16,
        n_group=2,
        topk_group=1,
        routed_scaling_factor=2.827,
        max_position_embeddings=262144,
        num_mtp_layers=0,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 50000.0,
            "factor": 64.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    )
    return transformers.DeepseekV3ForCausalLM(config)


def glm() -> transformers.PreTrainedModel:
    """GLM 5.2: eight layers F F F S S S F S of full and shared indexers that select 8 tokens."""
    config = transformers.GlmMoeDsaConfig(
        **COMMON,
        num_hidden_layers=8,
        first_k_dense_replace=3,
        v_head_dim=20,
        n_group=1,
        topk_group=1,
        routed_scaling_factor=2.5,
        max_position_embeddings=1048576,
        index_topk=8,
        index_head_dim=16,
        index_n_heads=32,
        index_topk_freq=4,
        index_skip_topk_offset=3,
        rope_parameters={"rope_type": "default", "rope_theta": 8e6},
    )
    assert "".join(t[0] for t in config.indexer_types) == "fffsssfs", config.indexer_types
    return transformers.GlmMoeDsaForCausalLM(config)


CASES = {"kimi": kimi, "glm": glm, "kimi_epsilon": kimi, "glm_epsilon": glm}


@torch.no_grad()
def randomise(
    model: transformers.PreTrainedModel, generator: torch.Generator, *, small_latents: bool
) -> None:
    """Redraws every parameter and buffer of the state in f32, each exact in bf16.

    ``small_latents`` scales q_a_proj and kv_a_proj_with_mqa by 0.1, so that the epsilon of the norms behind
    them (1e-6, where the other norms have 1e-5) changes the logits.
    """
    for name, tensor in model.state_dict().items():
        noise = torch.randn(tensor.shape, generator=generator)
        if name.endswith("e_score_correction_bias"):
            value = 0.2 * noise
        elif "norm" in name and name.endswith("weight"):
            value = 1 + 0.1 * noise
        elif name.endswith("bias"):
            value = 0.1 * noise
        elif "embed_tokens" in name:
            value = noise
        else:
            value = noise / tensor.shape[-1] ** 0.5
        if small_latents and ("q_a_proj" in name or "kv_a_proj_with_mqa" in name):
            value = 0.1 * value
        tensor.copy_(value.to(torch.bfloat16).float())


@contextlib.contextmanager
def selection_margins(margins: list[float]):
    """Records, for every topk inside, the smallest gap between the last chosen and the first left out."""
    function, method = torch.topk, torch.Tensor.topk

    def record(values, k, dim=-1, **kwargs):
        if k < values.shape[dim]:
            last, first = function(values, k + 1, dim=dim)[0].float().movedim(dim, -1)[..., -2:].unbind(-1)
            gaps = (last - first)[first > -1e30]  # masked entries are no candidates
            margins.extend([gaps.min().item()] if gaps.numel() else [])
        return function(values, k, dim=dim, **kwargs)

    torch.topk = torch.Tensor.topk = record
    try:
        yield
    finally:
        torch.topk, torch.Tensor.topk = function, method


def write_safetensors(path: pathlib.Path, tensors: dict[str, torch.Tensor]) -> None:
    """The safetensors layout: u64 header length, JSON header, data."""
    codes = {torch.float32: "F32", torch.int32: "I32"}
    header, chunks, end = {}, [], 0
    for name, tensor in tensors.items():
        chunks.append(tensor.contiguous().numpy().tobytes())
        start, end = end, end + len(chunks[-1])
        header[name] = {
            "dtype": codes[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(chunks))


def write_case(case: str, directory: pathlib.Path, seed: int) -> int:
    """Writes one case, from the first seed at or after ``seed`` whose margins suffice; returns that seed."""
    model = CASES[case]().eval()
    while True:
        generator = torch.Generator().manual_seed(seed)
        randomise(model, generator, small_latents=case.endswith("_epsilon"))
        prompts = [torch.randint(0, VOCABULARY, (n,), generator=generator) for n in PROMPT_LENGTHS]
        margins: list[float] = []
        with torch.no_grad(), selection_margins(margins):
            logits = [model(prompt[None], use_cache=False).logits[0].float() for prompt in prompts]
        if min(margins) >= MARGIN:
            break
        seed += 1

    model.to(torch.bfloat16)  # exact: randomise rounded every value
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.data = buffer.data.float()
    model.save_pretrained(directory)
    (directory / "generation_config.json").unlink(missing_ok=True)
    tensors = {f"tokens_{i}": prompt.to(torch.int32) for i, prompt in enumerate(prompts)}
    tensors |= {f"logits_{i}": logit for i, logit in enumerate(logits)}
    write_safetensors(directory / "reference.safetensors", tensors)
    facts = {
        "case": case,
        "seed": seed,
        "smallest_margin": min(margins),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    (directory / "reference.json").write_text(json.dumps(facts, indent=2) + "\n")
    return seed


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--cases", nargs="+", choices=sorted(CASES), default=list(CASES))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    for case in arguments.cases:
        seed = write_case(case, arguments.out / case, arguments.seed)
        print(f"{case}: seed {seed}")


if __name__ == "__main__":
    main()
