"""Generates the messages of specsplit/rpc/pb from the proto files beside this script; `make proto` runs it.

Messages only: the services are few, and specsplit/rpc calls and serves them by name, with the bytes in its own hands.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

PROTO = Path(__file__).resolve().parent
OUTPUT = PROTO.parent / "specsplit" / "rpc" / "pb"
PACKAGE = "specsplit/v1"
DOCSTRING = '"""Messages generated from proto/ by `make proto`; not to be edited."""\n'


def generate(output: Path) -> None:
    """Write the modules and their types into the folder `output`."""
    sources = sorted(path.relative_to(PROTO).as_posix() for path in (PROTO / PACKAGE).glob("*.proto"))
    with tempfile.TemporaryDirectory() as scratch:
        plugin = Path(sys.executable).with_name("protoc-gen-mypy")
        outputs = [f"--python_out={scratch}", f"--mypy_out=quiet:{scratch}"]
        if protoc.main(["protoc", f"--proto_path={PROTO}", f"--plugin={plugin}", *outputs, *sources]) != 0:
            raise SystemExit("protoc failed; its message is above.")
        output.mkdir(parents=True, exist_ok=True)
        (output / "__init__.py").write_text(DOCSTRING, encoding="utf-8")
        for generated in sorted(Path(scratch, PACKAGE).iterdir()):
            (output / generated.name).write_text(_rehomed(generated.read_text(encoding="utf-8")), encoding="utf-8")


def _rehomed(code: str) -> str:
    """Return `code` with the modules of specsplit.v1 named specsplit.rpc.pb, where they lie."""
    return re.sub(r"(\bfrom |')specsplit\.v1(?= import|\.\w+_pb2')", r"\1specsplit.rpc.pb", code)


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else OUTPUT)
