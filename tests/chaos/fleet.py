"""Two gateways over the workers of a model, every process to be restarted on its own: with replicas, or without."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from tests.chaos.farm import MODEL
from tests.support.certificates import Authority
from tests.support.gateways import GatewayProcess
from tests.support.processes import ROOT, WorkerProcess

_DRAIN = ("--drain", "100")
"""Longer than any answer takes, on a machine that does other work besides."""
_WORKER = ("--sessions", "8", "--threads", "1", "--dtype", "fp32", *_DRAIN)
_STAGE = ("--sessions", "8", "--dtype", "fp32", *_DRAIN)
_STAGES = {"stage a": "0:6", "stage b": "6:12", "spare a": "0:6", "spare b": "6:12"}
_RETRY_S = "120"
"""Gateways over a single target wait for its restart."""


class Fleet:
    """Processes by their names.

    With replicas there are two gateways, each with a draft of its own, a whole target, and one over two stages, each of
    which has a spare. Without, there are two gateways over one draft and one target. All links have certificates.
    """

    def __init__(self, folder: Path, *, has_replicas: bool, first_tree: Path | None = None) -> None:
        self._folder, self._has_replicas, self._first_tree = folder, has_replicas, first_tree
        self._authority = Authority(folder / "certificates")
        self._workers: dict[str, WorkerProcess] = {}
        self._gateways: dict[str, GatewayProcess] = {}
        self._options: dict[str, Sequence[str]] = {}
        """Options of the gateways."""

    async def __aenter__(self) -> Fleet:
        try:
            await asyncio.to_thread(self._start)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *raised: object) -> None:
        for process in (*self._gateways.values(), *self._workers.values()):
            process.close()

    def _start(self) -> None:
        if self._has_replicas:
            for name, layers in _STAGES.items():
                self._worker(name, "stage", "--layers", layers, *_STAGE)
            at = {name: self._workers[name].address for name in _STAGES}
            stages = ("--stages", f"{at['stage a']},{at['stage b']}", "--spares", f"{at['spare a']},{at['spare b']}")
            self._worker("staged target", "target", *stages, *_WORKER)
        for name in ("draft 0", "draft 1") if self._has_replicas else ("draft 0",):
            self._worker(name, "draft", *_WORKER)
        self._worker("target", "target", *_WORKER)
        targets = [self._workers[name].address for name in ("target", "staged target") if name in self._workers]
        named = [word for address in targets for word in ("--target", f"{MODEL}={address}")]
        waits = () if self._has_replicas else ("--retry", _RETRY_S)
        for index in range(2):
            draft = self._workers[f"draft {index if self._has_replicas else 0}"].address
            name = f"gateway {index}"
            self._options[name] = (*named, "--draft", f"{MODEL}={draft}", *waits, *_DRAIN, *self._identity(name))
            self._gateways[name] = GatewayProcess(self._own(name), *self._options[name], tree=self._first_tree)
        for gateway in self._gateways.values():
            assert gateway.ready

    @property
    def urls(self) -> list[str]:
        return [gateway.url for gateway in self._gateways.values()]

    @property
    def parts(self) -> list[str]:
        """All processes, in the order in which they are restarted."""
        return [*self._workers, *self._gateways]

    async def restart(self, part: str) -> int:
        """Tell a process to stop, wait for its end, and start it again; return its exit code once it serves."""
        return await asyncio.to_thread(self._restart_gateway if part in self._gateways else self._restart_worker, part)

    def _restart_worker(self, part: str) -> int:
        worker = self._workers[part]
        code = worker.stop()
        worker.start()
        assert worker.ready
        return code

    def _restart_gateway(self, part: str) -> int:
        before = self._gateways[part]
        code, http = before.stop(), str(before.ready["address"])
        self._gateways[part] = GatewayProcess(self._own(part), *self._options[part], http=http)
        assert self._gateways[part].ready
        return code

    def _worker(self, name: str, role: str, *arguments: str) -> None:
        is_fresh, tree = self._first_tree is not None, self._first_tree or ROOT
        words = (*arguments, *self._identity(name))
        self._workers[name] = WorkerProcess(role, self._own(name), *words, is_fresh=is_fresh, tree=tree)

    def _identity(self, name: str) -> list[str]:
        role = "stage" if name.startswith("spare") else name.removeprefix("staged ").split()[0]
        return self._authority.role(role, name.replace(" ", "-")).options()  # type: ignore[arg-type]

    def _own(self, name: str) -> Path:
        own = self._folder / name.replace(" ", "-")
        own.mkdir(exist_ok=True)
        return own
