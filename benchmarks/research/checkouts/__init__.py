"""Compares the speed of two checkouts of this repository."""
