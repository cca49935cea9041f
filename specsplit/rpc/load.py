"""Load of a worker and progress of a call as messages, both ways. Knows no turn and no tree."""

from __future__ import annotations

from specsplit.core.progress import Progress
from specsplit.rpc.pb import common_pb2
from specsplit.telemetry.statistics import WorkerLoad


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
    return common_pb2.WorkerLoad(
        num_sessions=load.num_sessions,
        num_free_slots=load.num_free_slots,
        num_slots=load.num_slots,
        num_waiting=load.num_waiting,
        num_kv_rows=load.num_kv_rows,
        num_free_kv_rows=load.num_free_kv_rows,
        kv_row_bytes=load.kv_row_bytes,
        num_preempted=load.num_preempted,
    )


def decode_load(message: common_pb2.WorkerLoad) -> WorkerLoad:
    """Return how busy a worker says that it is."""
    return WorkerLoad(
        message.num_sessions,
        message.num_free_slots,
        message.num_slots,
        message.num_waiting,
        message.num_kv_rows,
        message.num_free_kv_rows,
        message.kv_row_bytes,
        message.num_preempted,
    )
