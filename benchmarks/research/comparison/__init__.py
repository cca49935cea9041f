"""`compare`: what changed between two results files of `run` beyond noise."""
