"""Compares how often coupled picks and rejection schemes accept (ADR 0001)."""
