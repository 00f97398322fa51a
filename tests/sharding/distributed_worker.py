"""One process of the multi-process test: one sharded prefill of tiny Kimi; prints the argmax of each row."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from kvmem.cache import store
from kvmem.models import decoder, get_config, params, sharded
from kvmem.sharding import mesh


def main(address: str, processes: int, index: int) -> None:
    if processes > 1:
        mesh.start_process(address, processes=processes, index=index)
    config = get_config("kimi_tiny_tp8")
    specs = params.param_specs(config, "int4_group")
    tp = mesh.make_mesh()
    whole = NamedSharding(tp, PartitionSpec())
    weights = sharded.place_params(params.init_params(config, "int4_group", seed=0), specs, tp)
    rows, steps = 3, 13
    table_BM = np.arange(1, 1 + rows * 4, dtype=np.int32).reshape(rows, 4)
    kv = store.init(decoder.cache_shape(config), "bf16_576", num_pages=1 + rows * 4, page_size=4)
    tokens_BT = np.random.default_rng(2).integers(0, config.vocab_size, (rows, steps)).astype(np.int32)
    batch = decoder.StepBatch(tokens_BT, np.full(rows, steps, np.int32), np.zeros(rows, np.int32), table_BM)
    kv, batch = jax.device_put(jax.tree.map(jnp.asarray, (kv, batch)), whole)
    logits_BW, _ = sharded.sharded_forward(config, specs, tp)(weights, kv, batch)
    best = np.asarray(logits_BW.addressable_data(0)).argmax(-1).tolist()
    print(f"{tp.devices.size} devices, {jax.process_count()} process, tokens {best}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
