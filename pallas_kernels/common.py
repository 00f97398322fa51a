"""What the kernels share: argument checks, page and expert addressing, pipelines, the cost model."""
