"""One small engine for each kind of test, compiled once for the module that uses it."""

import dataclasses

import numpy as np
import pytest

from kvmem import models
from kvmem.engine.engine import Engine
from kvmem.engine.request import EngineConfig, PhaseFormat, Request, SamplingParams
from kvmem.models import params

F32 = PhaseFormat("f32", "f32_576")
SMALL = EngineConfig(
    max_rows=5,
    prefill_pages=31,
    decode_pages=27,
    max_pages_per_row=9,
    prefill=F32,
    decode=F32,
    page_size=4,
    prefill_rows=2,
    prefill_chunk=8,
)
FIXED = SamplingParams(ignore_eos=True)


@pytest.fixture(scope="session")
def kimi():
    return models.get_config("kimi_tiny_parity")


@pytest.fixture(scope="session")
def weights(kimi):
    return params.init_params(kimi, "f32", 0)


@pytest.fixture(scope="session")
def make_engine(kimi, weights):
    """Builds an engine; programs of equal configurations are compiled once, JAX keeps them."""

    def make(**changes) -> Engine:
        return Engine(kimi, {"prefill": weights, "decode": weights}, dataclasses.replace(SMALL, **changes))

    return make


@pytest.fixture(scope="session")
def solo(make_engine):
    """Tokens of a request served alone, by an engine of the same shapes."""
    engine = make_engine(prefix_cache=False)
    known: dict[tuple, tuple[int, ...]] = {}

    def answer(request: Request) -> tuple[int, ...]:
        key = (request.prompt_tokens, request.max_new_tokens, request.sampling)
        if key not in known:
            plain = dataclasses.replace(
                request, arrival_s=0.0, deadline_s=None, request_id=f"solo{len(known)}"
            )
            (result,) = engine.run([plain])
            assert result.finish_reason in ("length", "stop")
            known[key] = result.tokens
        return known[key]

    return answer


def some_requests(
    count: int, seed: int = 0, *, shared: int = 9, longest: int = 8, sampling=FIXED
) -> list[Request]:
    """Requests of which all share a prefix of ``shared`` tokens; prompt and answer fit nine pages of four."""
    rng = np.random.default_rng(seed)
    base = tuple(rng.integers(1, 97, shared).tolist())
    return [
        Request(
            f"q{i}",
            base + tuple(rng.integers(1, 97, int(rng.integers(2, 15))).tolist()),
            int(rng.integers(3, longest + 1)),
            sampling,
        )
        for i in range(count)
    ]
