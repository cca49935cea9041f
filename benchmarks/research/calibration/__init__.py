"""Judges the estimates of acceptance that steer the trees."""
