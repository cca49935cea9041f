"""What holds for every test: no network, few threads, and examples that are the same on every machine.

`SPECSPLIT_TEST_ALL=1` (set by `make test-all`) asks for the full product: more examples, every combination.
"""

from __future__ import annotations

import atexit
import gc
import os
import resource
import shutil
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings

from tests.support.caches import link_kernels

# Set before anything imports torch or transformers, which read them once.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# The command line sets it for itself, which is too late where it is called in a process that has gRPC already.
os.environ["GRPC_VERBOSITY"] = "NONE"
# Beside another process of `make test`, a second thread would only wait for the first.
os.environ.setdefault("OMP_NUM_THREADS", "1" if "PYTEST_XDIST_WORKER" in os.environ else "2")
# What a developer's own cache holds changes no test, and tests leave nothing there but compiled kernels.
_known = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="specsplit-tests-")
link_kernels(Path(os.environ["XDG_CACHE_HOME"]), _known)
atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)
for name in list(os.environ):
    if name.startswith("SPECSPLIT_") and not name.startswith("SPECSPLIT_TEST_"):
        del os.environ[name]  # a developer's own settings must not change what a test sees

# A test opens a thousand connections to a gateway, whose process inherits this one's limit of open files.
_soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
_wanted = 65_536 if _hard == resource.RLIM_INFINITY else min(_hard, 65_536)
if _soft != resource.RLIM_INFINITY and _soft < _wanted:
    resource.setrlimit(resource.RLIMIT_NOFILE, (_wanted, _hard))

settings.register_profile(
    "ci",
    derandomize=True,
    deadline=None,
    max_examples=50,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("all", parent=settings.get_profile("ci"), max_examples=500)
settings.load_profile("all" if os.environ.get("SPECSPLIT_TEST_ALL") == "1" else "ci")


def pytest_collection_finish() -> None:
    """Keep the collector from going through half a million objects of imports and tests, which stay to the end."""
    gc.collect()
    gc.freeze()
