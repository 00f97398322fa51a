"""Run records: what ran, from which commit, where, and what came out. Written here and nowhere else."""
