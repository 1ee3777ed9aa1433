"""Real engines: the actual drafter, length head and trainer. torch is imported inside functions only."""
