"""Load of a worker and progress of a call as messages, both ways. Knows no turn and no tree."""

from __future__ import annotations

from dataclasses import fields

from specsplit.core.progress import Progress
from specsplit.rpc.pb import common_pb2
from specsplit.telemetry.statistics import WorkerLoad

_LOAD = [field.name for field in fields(WorkerLoad)]
"""The message has the same names."""


def encode_progress(progress: Progress) -> common_pb2.Progress:
    """Return the message of `progress`."""
    return common_pb2.Progress(
        queued=progress.queued, position=progress.position, done=progress.done, total=progress.total
    )


def decode_progress(message: common_pb2.Progress) -> Progress:
    """Return the progress that a worker reports."""
    return Progress(message.queued, message.position, message.done, message.total)


def encode_load(load: WorkerLoad) -> common_pb2.WorkerLoad:
    """Return the message of `load`."""
    return common_pb2.WorkerLoad(**{name: getattr(load, name) for name in _LOAD})


def decode_load(message: common_pb2.WorkerLoad) -> WorkerLoad:
    """Return how busy a worker says that it is."""
    return WorkerLoad(**{name: getattr(message, name) for name in _LOAD})
