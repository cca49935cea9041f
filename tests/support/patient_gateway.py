"""`specsplit` with a gateway that waits for an hour, not for a minute, for a client that reads nothing."""

from __future__ import annotations

import sys

from specsplit.cli.main import main
from specsplit.gateway import server

if __name__ == "__main__":
    server.SEND_S = 3600.0
    sys.exit(main())
