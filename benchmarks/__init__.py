"""Measurements of SpecSplit against itself and its peers; see `python -m benchmarks --help`."""
