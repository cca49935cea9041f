"""The same settings as every other test: no network, few threads, examples that are the same on every machine."""

from tests.conftest import settings

__all__ = ["settings"]
