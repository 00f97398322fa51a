"""Answers one prompt from a checkpoint directory and prints the text.

    python -m experiments.generate --checkpoint=DIR --prompt="What is 6 times 7?" [--max_new_tokens=64]

The directory is a Hugging Face one (Kimi or GLM, packed INT4, FP8 or BF16); its tokenizer is used, or bytes
if it has none. The prompt becomes a chat turn, unless ``--raw`` continues it as plain text. Prefill and
decode run in the family's published formats on the default device. Greedy unless ``--temperature`` is set.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any, cast

from absl import app, flags

from experiments import launch
from kvmem.checkpoint import hf
from kvmem.checkpoint.directory import CheckpointDirectory
from kvmem.engine.engine import Engine
from kvmem.engine.request import EngineConfig, Request, SamplingParams, default_formats
from kvmem.models import params, sharded
from kvmem.models.config import ModelConfig
from kvmem.models.hf_config import from_hf
from kvmem.models.params import Weights
from kvmem.models.text import chat, tools
from kvmem.models.text import tokenizer as tokenizers
from kvmem.sharding.mesh import make_mesh

PAGE = 64


def prompt_ids(
    tokenizer: tokenizers.Tokenizer,
    config: ModelConfig,
    prompt: str,
    *,
    system: str = "",
    declared: Sequence[tools.Tool] = (),
    thinking: bool = True,
    raw: bool = False,
) -> tuple[int, ...]:
    """The prompt's token ids: a chat turn of the model's format, or the text as it stands."""
    if raw:
        return tuple(tokenizer.encode(prompt))
    messages = [chat.Message("system", system)] if system else []
    messages.append(chat.Message("user", prompt))
    pieces = chat.render(config.family, messages, declared, chat.Options(thinking=thinking))
    return tuple(chat.encode(tokenizer, pieces))


def generate(
    directory: pathlib.Path,
    prompt: str,
    *,
    max_new_tokens: int = 64,
    sampling: SamplingParams | None = None,
    system: str = "",
    declared: Sequence[tools.Tool] = (),
    thinking: bool = True,
    raw: bool = False,
    tp: int = 1,
) -> tuple[str, ModelConfig]:
    """Loads the checkpoint, serves one request, and returns the text of its answer.

    Raises ValueError for what ``hf.load``, the tokenizer or the engine refuse, and if the answer fails.
    """
    sampling = sampling or SamplingParams()
    sampling.validate()
    config = from_hf(CheckpointDirectory(directory).config)
    tokenizer = tokenizers.load(directory, config)
    ids = prompt_ids(tokenizer, config, prompt, system=system, declared=declared, thinking=thinking, raw=raw)
    mesh = make_mesh(tp) if tp > 1 else None
    formats = default_formats(config.family)
    split = {
        phase: sharded.partition_specs(params.param_specs(config, cast(Weights, form.weights)), tp)
        for phase, form in formats.items()
    }
    loaded: dict[str, Any] = {}
    said: dict[str, None] = {}
    for phase, form in formats.items():
        if form.weights not in loaded:  # Kimi's phases share one set of weights
            _, loaded[form.weights], report = hf.load(
                directory,
                cast(Weights, form.weights),
                mesh=mesh,
                accept_cache_scale=True,
                progress=lambda items: launch.progress(items, "loading"),
            )
            said |= dict.fromkeys(report.lines())
        # The flat FP8 cache is the only one that is given a scale.
        if form.cache == "fp8_576" and report.cache_scale is not None:
            formats[phase] = dataclasses.replace(form, scale=report.cache_scale)
    print("\n".join(said), file=sys.stderr)
    pages = -(-(len(ids) + max_new_tokens) // PAGE)
    engine = Engine(
        config,
        {phase: loaded[form.weights] for phase, form in formats.items()},
        EngineConfig(
            max_rows=1,
            prefill_rows=1,
            prefill_pages=pages + 1,
            decode_pages=pages + 1,
            max_pages_per_row=pages,
            page_size=PAGE,
            prefill=formats["prefill"],
            decode=formats["decode"],
        ),
        dict.fromkeys(formats, mesh),
        param_specs=None if mesh is None else split,
        detokenize=tokenizer.decode,
    )
    request = Request("prompt", ids, max_new_tokens, sampling)
    result = engine.run([request])[0]
    if not result.ok:
        raise ValueError(f"the request ended with {result.finish_reason!r}: {result.error}")
    tokens = [token for token in result.tokens if token not in config.eos_ids]
    return tokenizer.decode(tokens), config


def define_flags(values: flags.FlagValues) -> None:
    define: dict[str, Any] = {"flag_values": values}
    flags.DEFINE_string("checkpoint", None, "Hugging Face directory.", required=True, **define)
    flags.DEFINE_string("prompt", None, "What to answer.", required=True, **define)
    flags.DEFINE_string("system", "", "System message.", **define)
    flags.DEFINE_string("tools", "", "JSON file with a list of function declarations.", **define)
    flags.DEFINE_integer("max_new_tokens", 64, "Longest answer.", lower_bound=1, **define)
    flags.DEFINE_float("temperature", 0.0, "0 is greedy.", **define)
    flags.DEFINE_float("top_p", 1.0, "Nucleus sampling.", **define)
    flags.DEFINE_integer("seed", 0, "Of the sampler.", **define)
    flags.DEFINE_integer("tp", 1, "Ranks of tensor parallelism.", lower_bound=1, **define)
    flags.DEFINE_bool("thinking", True, "Let the model reason first.", **define)
    flags.DEFINE_bool("raw", False, "Continue the prompt as plain text, without a chat format.", **define)


def run(flag: flags.FlagValues, rest: Sequence[str]) -> int:
    """Answers the prompt of the flags on standard output; returns the exit status."""
    try:
        if rest:
            raise ValueError(f"{list(rest)}: only flags are taken; the prompt is --prompt=TEXT")
        declared = json.loads(pathlib.Path(flag.tools).read_text()) if flag.tools else []
        text, config = generate(
            pathlib.Path(flag.checkpoint),
            flag.prompt,
            max_new_tokens=flag.max_new_tokens,
            sampling=SamplingParams(temperature=flag.temperature, top_p=flag.top_p, seed=flag.seed),
            system=flag.system,
            declared=declared,
            thinking=flag.thinking,
            raw=flag.raw,
            tp=flag.tp,
        )
    except (ValueError, NotImplementedError, OSError) as error:
        print(f"error: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    print(text)
    if declared:
        answer = tools.parse(config.family, text, declared, thinking=flag.thinking and not flag.raw)
        for call in answer.calls:
            print(f"call {call.call_id}: {call.name}({json.dumps(call.arguments)})", file=sys.stderr)
        for problem in answer.problems:
            print(f"no call: {problem}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    define_flags(flags.FLAGS)
    app.run(lambda argv: sys.exit(run(flags.FLAGS, argv[1:])))
