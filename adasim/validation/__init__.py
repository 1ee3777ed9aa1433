"""Predicted against measured: real and simulated runs of one scenario, their errors, and whose fault they are."""
