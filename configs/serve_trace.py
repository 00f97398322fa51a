"""Serving under load: closed loop, open-loop replay, sessions, routing and prefix tables.

    python -m experiments.serve_trace --config=configs/serve_trace.py:quick --workdir=runs/serve_trace
    python -m experiments.serve_trace --config=configs/serve_trace.py:host --workdir=runs/serve_host
    python -m experiments.serve_trace --config=configs/serve_trace.py --workdir=runs/serve_trace

``quick`` takes about two minutes on two CPU cores, the full run about ten. ``host`` measures nothing but the
host's processor time a step (``host_ms_per_step.rows64``, target 1 ms), in half a minute. All serve the tiny
Kimi on the CPU, so times say how the engine behaves, not how fast a GPU would be; the tables of a simulated
clock are at real prompt lengths. Expected: 0 recompilations after warm-up, 0 integrity mismatches.
"""

from ml_collections import ConfigDict


def get_config(arg: str = "") -> ConfigDict:
    """``arg``: "", "quick", or "host"."""
    if arg not in ("", "quick", "host"):
        raise ValueError(f"unknown argument {arg!r}; known: '', 'quick', 'host'")
    quick = arg != ""
    config = ConfigDict()
    config.model = "kimi_tiny_parity"
    config.seed = 0
    # A Hugging Face-layout checkpoint directory; empty: random weights of the tiny model.
    config.checkpoint = ""
    # A JSONL file of prompts or token ids; empty: the traces below.
    config.requests = ""
    # Trace files are read from here where present, else the generator makes a trace of the same statistics.
    config.data = "../shared/data"
    config.integrity = "tags"
    # Whether the served formats passed the quality equivalence test: without it no token counts as useful.
    config.quality_equal = False
    config.engine = ConfigDict(
        {
            "max_rows": 16,
            "page_size": 16,
            "prefill_pages": 385,
            "decode_pages": 257,
            "max_pages_per_row": 24,
            "prefill_rows": 2,
            "prefill_chunk": 64,
        }
    )
    # Lengths of traces are divided by ``shrink``, so that prefixes keep their structure on a tiny model.
    config.replay = ConfigDict(
        {"trace": "mooncake_conversation", "count": 48 if quick else 400, "shrink": 32, "time_scale": 0.5}
    )
    config.closed_loop = ConfigDict(
        {"concurrency": (1, 4, 16), "count": 24 if quick else 96, "prompt": 64, "answer": 16}
    )
    config.sessions = ConfigDict({"agent": 2 if quick else 8, "chat": 4 if quick else 24, "scale": 1 / 64})
    config.invariant = ConfigDict({"count": 12 if quick else 48, "repeats": 5})
    config.bound = ConfigDict({"ttft_s": 2.0, "tpot_s": 0.25})
    # Engines behind the router, by turns in this process, each on its own clock; starts of sessions a second.
    config.fleet = ConfigDict({"replicas": 3, "sessions": 6 if quick else 24, "rate": 4.0})
    # Simulated: replicas, requests of each trace, and pages of 64 tokens as on a real deployment.
    config.routing = ConfigDict(
        {
            "replicas": 4,
            "count": 500 if quick else 3000,
            "shrink": 16,
            "prefill_pages": 21406,
            "decode_pages": 21406,
            "traces": ("mooncake_conversation", "azure_conversation"),
        }
    )
    config.host = ConfigDict({"rows": 64, "steps": 60, "repeats": 5, "alone": arg == "host"})
    return config
