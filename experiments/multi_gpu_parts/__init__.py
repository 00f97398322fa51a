"""The parts of ``experiments.multi_gpu``, each a function of the config and of what it reports to."""
