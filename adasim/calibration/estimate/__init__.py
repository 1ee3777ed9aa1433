"""Estimators: from the tables of recorded runs to components, with intervals. Pure functions; nothing reads a file."""
