"""Load on a system: many clients at once, in a closed or an open loop, over modes, batched generate or an endpoint."""
