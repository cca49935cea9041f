"""What the studies that resample share; their samples are many, such as prompts and tree nodes."""

NUM_RESAMPLES = 2000
BOOTSTRAP_SEED = 20260
CONFIDENCE = 0.95
