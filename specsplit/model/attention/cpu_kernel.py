"""Attention for a CPU in one operator: span_attention.cpp, compiled once for a machine that has a C++ compiler.

Torch's own kernels take two to four times as long for a few rows, and a tree costs them a pass over the text for
each of its paths. Where nothing compiles, `function` does the same with torch's operators (docs/adr/0038).
"""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch

from specsplit.core.defaults import ENV_CPU_KERNEL
from specsplit.model import processor
from specsplit.model.files import one_line
from specsplit.model.proofs import digest
from specsplit.model.user_cache import user_cache

logger = logging.getLogger(__name__)
SOURCE = Path(__file__).with_name("span_attention.cpp")
_SCHEMA = (
    "attend_spans(Tensor q, Tensor k, Tensor v, Tensor(a!) keys, Tensor(b!) values, Tensor spans, Tensor tables, "
    "Tensor biases, float scaling, float softcap, Tensor? sinks) -> Tensor"
)
_COMPILERS = ("c++", "g++", "clang++")
_OPTIONS = {
    "AVX2": ("-march=x86-64-v3",),
    "AVX512": ("-march=x86-64-v4",),
    "AVX512_BF16": ("-march=x86-64-v4", "-mavx512bf16"),
}
"""The compiler's options for each kind of processor."""
_STABLE_SINCE = "0x020b000000000000"
"""The release of torch, 2.11, whose stable interface is used: what was compiled runs with later ones, too."""
_TIMEOUT_S = 120
_lock = threading.Lock()
_library = torch.library.Library("specsplit", "FRAGMENT")
_library.define(_SCHEMA)


@cache
def kernel_digest() -> str:
    """Return what tells this process's kernel from others; "" if it has none. The first call loads or compiles it."""
    kind = _kind()
    if kind is None or os.environ.get(ENV_CPU_KERNEL, "1") == "0":
        return ""
    try:
        with _lock:  # what another thread has just compiled is found then
            _load(kind)
    except (OSError, RuntimeError, ValueError, subprocess.SubprocessError) as error:
        logger.warning("Attention is computed by torch's operators, which are slower: %s.", one_line(error))
        return ""
    return digest(SOURCE.read_bytes(), kind)


def build(kind: str, folder: Path) -> Path:
    """Compile it for a kind of processor into a folder; return the file.

    Raises:
        OSError, ValueError, RuntimeError, subprocess.SubprocessError: there is no compiler, or it fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as own:
        made = Path(own) / _name(kind)
        command = _command(kind, made)
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{command[0]} fails: {done.stderr.strip() or done.returncode}")
        made.chmod(0o755)
        return made.replace(folder / made.name)


def _kind() -> str | None:
    """Return the best kind whose instructions this processor has and torch itself uses; None if there is none."""
    kind = torch.backends.cpu.get_cpu_capability()
    if kind == "AVX512" and "avx512_bf16" in processor.instructions():
        return "AVX512_BF16"
    return kind if kind in _OPTIONS else None


def _name(kind: str) -> str:
    return f"span_attention-{digest(SOURCE.read_bytes(), torch.__version__)}-{kind.lower()}.so"


def _own_folder() -> Path | None:
    folder = user_cache()
    return folder / "kernels" if folder is not None else None


def _found(kind: str) -> Path | None:
    """Return what was compiled before, by an image's maker or this user."""
    folders = [folder for folder in (SOURCE.parent, _own_folder()) if folder is not None]
    return next((path for folder in folders if _is_ours(path := folder / _name(kind))), None)


def _is_ours(path: Path) -> bool:
    """Return whether there is such a file and nobody else could have put it there."""
    try:
        status = path.stat()
    except OSError:
        return False
    return status.st_uid in (0, os.getuid()) and not status.st_mode & 0o022


def _load(kind: str) -> None:
    found = _found(kind)
    if found is not None:
        torch.ops.load_library(found)
        return
    logger.info("Compiling the attention for this processor, once.")
    folder = _own_folder()
    if folder is not None:
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError:
            folder = None  # nothing can be kept here
    if folder is not None:
        torch.ops.load_library(build(kind, folder))
        return
    with tempfile.TemporaryDirectory() as passing:
        torch.ops.load_library(build(kind, Path(passing)))


def _command(kind: str, made: Path) -> Sequence[str]:
    """Return the compiler's command. It names torch's library, which every process that loads the result has."""
    given = shlex.split(os.environ.get("CXX", ""))
    found = given or [path for name in _COMPILERS if (path := shutil.which(name))][:1]
    if not found:
        raise OSError("there is no C++ compiler")
    home = Path(torch.__file__).parent
    options = ("-O3", "-std=c++17", *_OPTIONS[kind], "-fPIC", "-shared", f"-DTORCH_TARGET_VERSION={_STABLE_SINCE}")
    files = (f"-I{home / 'include'}", str(SOURCE), f"-L{home / 'lib'}", "-ltorch_cpu", "-o", str(made))
    return [*found, *options, *files]


if __name__ == "__main__":  # for machines without a compiler, as an image's are
    for each in _OPTIONS:
        build(each, SOURCE.parent)
