"""Measures a target cut into stages: the cost of the cuts, and sessions whose steps overlap."""
