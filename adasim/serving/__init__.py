"""What every engine, simulated or real, does with requests: who waits, who runs, who holds memory, what is noted."""
