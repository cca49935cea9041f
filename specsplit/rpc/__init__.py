"""The ports over gRPC. Importing it keeps gRPC's own log lines off stderr: our errors say what they say."""

import os

# gRPC reads it once, when it is imported; who has set it wants the lines, and who has imported grpc before has chosen.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
