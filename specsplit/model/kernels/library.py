"""Operators of our own for a CPU, compiled once for a machine that has a C++ compiler (docs/adr/0038).

Attention takes torch's own kernels two to four times as long for a few rows, and a tree costs them a pass over the text
for each of its paths. Where nothing compiles, torch's operators do the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shlex
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from specsplit.core.defaults import ENV_CPU_KERNEL
from specsplit.model import processor
from specsplit.model.files import one_line
from specsplit.model.proofs import digest
from specsplit.model.user_cache import user_cache

logger = logging.getLogger(__name__)
FOLDER = Path(__file__).parent
_SOURCES = ("span_attention.cpp", "row_operators.cpp", "products.cpp", "rounded_products.cpp", "row_search.cpp")
_HEADERS = ("vectors.h", "tensors.h")
_SCHEMAS = (
    (
        "attend_spans(Tensor q, Tensor k, Tensor v, Tensor(a!) keys, Tensor(b!) values, Tensor spans, Tensor tables, "
        "Tensor biases, float scaling, float softcap, Tensor? sinks) -> Tensor"
    ),
    "rms_norm(Tensor x, Tensor weight, float epsilon, int form) -> Tensor",
    "silu(Tensor x) -> Tensor",
    "rotate(Tensor x, Tensor cos, Tensor sin) -> Tensor",
    "pack_pairs(Tensor weight) -> Tensor",
    "product(Tensor x, Tensor packed, Tensor bias, int num_outputs) -> Tensor",
    "pack_bytes(Tensor codes) -> Tensor",
    "product_bytes(Tensor x, Tensor packed, Tensor scales, Tensor bias) -> Tensor",
    "pack_nibbles(Tensor codes) -> Tensor",
    "product_nibbles(Tensor x, Tensor packed, Tensor scales, Tensor bias, int num_outputs) -> Tensor",
    (
        "best_of_rows(Tensor rows, Tensor? tokens, int[] keys, int count, float temperature, int top_k, float top_p, "
        "float min_p) -> Tensor"
    ),
)
_COMPILERS = ("c++", "g++", "clang++")
KINDS = {
    "AVX2": ("-march=x86-64-v3",),
    "AVX512": ("-march=x86-64-v4",),
    "AVX512_VNNI": ("-march=x86-64-v4", "-mavx512vnni"),
    "AVX512_BF16": ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16"),
}
"""The compiler's options for each kind of processor."""
_AVX2 = frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2", "abm", "movbe"})
_AVX512 = frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"})
_STABLE_SINCE = "0x020b000000000000"
"""The release of torch, 2.11, whose stable interface is used: what was compiled runs with later ones, too."""
_OPTIONS = ("-O3", "-std=c++17", "-fPIC", f"-DTORCH_TARGET_VERSION={_STABLE_SINCE}")
_TIMEOUT_S = 120
_AT_ONCE = 2
"""Sources that are compiled side by side; each takes a third of a gigabyte."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_lock = threading.Lock()
_library = torch.library.Library("specsplit", "FRAGMENT")
for _schema in _SCHEMAS:
    _library.define(_schema)


def kernel_digest() -> str:
    """Return what tells this process's kernels from others, by their compiled code; "" if it has none.

    The first call loads or compiles them.
    """
    with _lock:  # two threads compile nothing twice
        return digest_at_first()


@cache
def digest_at_first() -> str:
    """Return what `kernel_digest` does; kept for the life of the process."""
    kind = _kind()
    if kind is None or os.environ.get(ENV_CPU_KERNEL, "1") == "0":
        return ""
    try:
        return _loaded(kind)
    except (OSError, RuntimeError, ValueError, subprocess.SubprocessError) as error:
        logger.warning("No kernels of our own, so torch's operators compute, which are slower: %s.", one_line(error))
        return ""


def has_kernels_for(x: Tensor) -> bool:
    """Return whether there are kernels for such a tensor."""
    return x.device.type == "cpu" and x.dtype in _DTYPES and bool(kernel_digest())


def whole_rows(x: Tensor) -> Tensor:
    """Return a tensor whose rows lie whole in memory, as all kernels take them; the other dimensions lie as they do."""
    return x if x.stride(-1) == 1 else x.contiguous()


def has_pair_products() -> bool:
    """Return whether there are kernels for products in bf16."""
    return _kind() == "AVX512_BF16" and bool(kernel_digest())


def has_byte_products() -> bool:
    """Return whether there are kernels for products with weights rounded to 8 or 4 bits."""
    return _kind() in ("AVX512_VNNI", "AVX512_BF16") and bool(kernel_digest())


def build(kind: str, folder: Path, *, is_for_here: bool = False) -> Path:
    """Compile them for a kind of processor into a folder, and load them first if they are for here; return the file.

    Raises:
        OSError, ValueError, RuntimeError, subprocess.SubprocessError: there is no compiler, or it fails.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=folder) as own:
        made = Path(own) / "made.so"
        _compile(kind, made)
        made.chmod(0o755)
        if is_for_here:
            torch.ops.load_library(made)
        with made.open("rb+") as file:
            os.fsync(file.fileno())
        return made.replace(folder / f"{_prefix(kind)}{_content_hash(made)}.so")


def _compile(kind: str, made: Path) -> None:
    """Compile with the first compiler that can."""
    given = shlex.split(os.environ.get("CXX", ""))
    commands = [given] if given else [[path] for name in _COMPILERS if (path := shutil.which(name))]
    reason = "there is no C++ compiler; install g++ 12 or later"
    home = Path(torch.__file__).parent
    # Where the files lie is no part of what is compiled, whose hash is compared.
    maps = [f"-ffile-prefix-map={FOLDER}=.", f"-ffile-prefix-map={home}=."]
    objects = [made.with_name(f"{name}.o") for name in _SOURCES]
    sources = [
        [*maps, f"-I{home / 'include'}", "-c", FOLDER / name, "-o", to]
        for name, to in zip(_SOURCES, objects, strict=True)
    ]
    # The library that every process that loads the result has.
    link = ["-shared", "-s", *objects, f"-L{home / 'lib'}", "-ltorch_cpu", "-o", made]
    for command in commands:
        options = [*command, *_OPTIONS, *KINDS[kind]]
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            failed = [error for error in pool.map(_failure_of, [[*options, *rest] for rest in sources]) if error]
        error = failed[0] if failed else _failure_of([*options, *link])
        if not error:
            return
        reason = f"{command[0]} fails (g++ 12 or later compiles them): {error}"
    raise RuntimeError(reason)


def _failure_of(command: Sequence[str | Path]) -> str:
    """Run a command, and return why it failed; "" if it did not."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    return "" if done.returncode == 0 else done.stderr.strip() or str(done.returncode)


def _kind() -> str | None:
    """Return the best kind whose instructions this processor has and torch itself uses; None if there is none."""
    capability, has = torch.backends.cpu.get_cpu_capability(), processor.instructions()
    if capability not in KINDS or not has >= _AVX2:
        return None
    if capability == "AVX2" or not has >= _AVX512:
        return "AVX2"
    if "avx512_vnni" not in has:
        return "AVX512"
    return "AVX512_BF16" if "avx512_bf16" in has else "AVX512_VNNI"


def _prefix(kind: str) -> str:
    """Return how the name of a file for a kind begins; the rest is the hash of what is in it."""
    code = [(FOLDER / name).read_bytes() for name in (*_SOURCES, *_HEADERS)]
    made_by = _OPTIONS, KINDS[kind], os.environ.get("CXX", ""), torch.__version__
    return f"specsplit-{kind.lower()}-{digest(code, made_by)}-"


def _content_hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _own_folder() -> Path | None:
    folder = user_cache()
    return folder / "kernels" if folder is not None else None


def _found(kind: str) -> Iterator[Path]:
    """Yield whole files that were compiled before, by an image's maker or this user, and by nobody else."""
    folders = [folder for folder in (FOLDER, _own_folder()) if folder is not None]
    prefix = _prefix(kind)
    for path in [path for folder in folders for path in folder.glob(f"{prefix}*.so")]:
        with contextlib.suppress(OSError):
            status = path.stat()
            is_ours = status.st_uid in (0, os.getuid()) and not status.st_mode & 0o022
            if is_ours and path.stem == prefix + _content_hash(path):
                yield path


def _loaded(kind: str) -> str:
    """Load what was compiled before, or compile it; return its digest."""
    for path in _found(kind):
        with contextlib.suppress(OSError):  # what does not load here is compiled anew
            torch.ops.load_library(path)
            return digest(path.stem)
    logger.info("Compiling the kernels for this processor, once.")
    folder = _own_folder()
    if folder is not None:
        with contextlib.suppress(OSError):  # nothing can be kept there, or run from there
            return digest(build(kind, folder, is_for_here=True).stem)
    with tempfile.TemporaryDirectory() as passing:
        return digest(build(kind, Path(passing), is_for_here=True).stem)


def build_all(folder: Path) -> Sequence[Path]:
    """Compile them for every kind of processor, for machines without a compiler: an image's."""
    return [build(kind, folder) for kind in KINDS]


if __name__ == "__main__":
    build_all(FOLDER)
