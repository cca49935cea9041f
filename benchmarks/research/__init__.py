"""Training of the embedded pair, and studies whose results the documentation quotes; not part of the harness."""
