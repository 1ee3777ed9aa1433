"""SimPy processes that play an engine's clock. The only place that imports SimPy."""
