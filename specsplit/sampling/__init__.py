"""Logits to tokens, the same on draft and target: processors -> noise -> pick -> walk, and the tree's mask."""
