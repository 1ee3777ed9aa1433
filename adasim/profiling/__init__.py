"""Measures what steps of a real engine cost: which visits, in which order, and what they found."""
