"""Systems under measurement, one adapter file each; every one meets `benchmarks.systems.System`."""
