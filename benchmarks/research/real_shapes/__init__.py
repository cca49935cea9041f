"""Pairs of random weights in the shapes that people run: their making, and what every mode costs on them."""
