"""Imports transformers' models without what they import beside and serving never calls: 1.3 s and 110 MB.

These are torch's compiler, its tensors over several machines, and what scores are computed with in training. While
transformers is imported, names of these packages are stood in for. Whoever uses such a name later gets the real one,
which is imported then; whoever imports such a package himself gets it whole.

Nothing is spared where torch has a GPU, or in a process that torchrun started or that is one of several by now: they
need the compiler and those tensors. What else differs is in docs/adr/0032.
"""

from __future__ import annotations

import inspect
import os
import sys
import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

import torch

_torch: Any = torch
_SPARED = (
    "torch._dynamo",
    "torch.distributed._composable",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "scipy",
    "sklearn",
)
_OF_SEVERAL = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
"""Variables that torchrun sets."""
_ANSWERED = ("transformers", "torch.compiler", "importlib")
"""Modules whose imports are stood in for; others get what they ask for."""
_Call = tuple[Sequence[Any], Mapping[str, Any]]


def import_lean(*modules: str) -> None:
    """Import these modules of transformers without what they need not have; with it if they do need it."""
    if any(module not in sys.modules for module in modules) and _can_spare():
        with suppress(Exception), _sparing():  # another transformers may ask more of a name than can be stood in for
            # Before others take the function from there: it would import the class to say that there is no instance.
            vars(import_module("transformers.distributed.utils")).update(is_dtensor=_is_dtensor)
            _import_all(modules)
    _import_all(modules)


def _can_spare() -> bool:
    is_of_several = torch.distributed.is_available() and torch.distributed.is_initialized()
    return not (torch.accelerator.is_available() or is_of_several or any(name in os.environ for name in _OF_SEVERAL))


def _import_all(modules: Sequence[str]) -> None:
    for module in modules:
        import_module(module)


def _is_dtensor(obj: object) -> bool:
    """Return what transformers' own function does: without its module, no tensor is spread over machines."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(obj, module.DTensor)


@contextmanager
def _sparing() -> Generator[None]:
    """Stand in for what this thread imports of the packages that are spared and not there yet."""
    finder = _Finder(tuple(name for name in _SPARED if name not in sys.modules))
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        finder.end()


class _Finder(MetaPathFinder, Loader):
    """Finds stand-ins for the spared packages that are installed, until its end."""

    def __init__(self, packages: Sequence[str]) -> None:
        self._packages = packages
        self._thread = threading.get_ident()
        self._modules: dict[str, ModuleType] = {}

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        """Return the spec of a stand-in, None for what is not spared or not there."""
        if threading.get_ident() != self._thread or not _is_in(fullname, self._packages):
            return None
        real = PathFinder.find_spec(fullname, path)
        if real is None:
            return None
        spec = ModuleSpec(fullname, self, origin=real.origin, is_package=True)
        spec.submodule_search_locations = real.submodule_search_locations or []
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Make the stand-in."""
        module = self._modules[spec.name] = _Module(spec.name, self)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: names are made as they are asked for."""

    @property
    def is_active(self) -> bool:
        """Whether it still stands in for packages."""
        return self in sys.meta_path

    def is_for(self, module: str) -> bool:
        """Return whether what this module imports now is stood in for."""
        return self.is_active and threading.get_ident() == self._thread and _is_in(module, _ANSWERED)

    def end(self) -> None:
        """Leave no trace in what is imported from now on."""
        if self.is_active:
            sys.meta_path.remove(self)
        for name, module in list(self._modules.items()):
            if sys.modules.get(name) is module:
                del sys.modules[name]
            package, _, own = name.rpartition(".")
            if vars(sys.modules.get(package, module)).get(own) is module:
                delattr(sys.modules[package], own)


def _is_in(name: str, packages: Sequence[str]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


class _Module(ModuleType):
    """Stands in for a module: each name that transformers asks of it is a `_Name`, or a mark that needs no compiler."""

    def __init__(self, name: str, finder: _Finder) -> None:
        super().__init__(name)
        self._finder = finder

    def __getattr__(self, name: str) -> Any:
        # Whoever looks through all modules asks for such names, but for these two.
        if name.startswith("__") and name not in ("__all__", "__version__") and self._finder.is_active:
            raise AttributeError(name)
        frame = inspect.currentframe()
        caller = frame.f_back if frame is not None else None
        if caller is None or not self._finder.is_for(caller.f_globals.get("__name__", "")):
            self._finder.end()
            return getattr(import_module(self.__name__), name)
        if name.startswith("__"):
            raise AttributeError(name)
        mark = _MARKS.get(f"{self.__name__}.{name}")
        return _Name(self.__name__, name, self._finder) if mark is None else mark


def _allow_in_graph(function: Any) -> Any:
    return function


def _assume_constant_result(function: Any) -> Any:
    function._dynamo_marked_constant = True  # all that the compiler's own function does
    return function


def _disable(function: Any = None, recursive: bool = True, **_: Any) -> Any:
    if function is None:
        return lambda marked: _disable(marked, recursive)
    return _torch._disable_dynamo(function, recursive)  # asks for the compiler when the function is called


_MARKS: Mapping[str, Any] = {
    "torch._dynamo.allow_in_graph": _allow_in_graph,
    "torch._dynamo.assume_constant_result": _assume_constant_result,
    "torch._dynamo.disable": _disable,
}


def _itself(value: Any) -> Any:
    return value


class _Name:
    """Stands in for a class or function of a module, and for what a class was called with while modules are imported.

    No object is an instance of a class that was never imported.
    """

    __slots__ = ("_call", "_finder", "_found", "_place")

    def __init__(self, module: str, name: str, finder: _Finder, call: _Call | None = None) -> None:
        for slot, value in (("_place", (module, name)), ("_finder", finder), ("_call", call), ("_found", None)):
            object.__setattr__(self, slot, value)

    def _real(self) -> Any:
        """Return what it stands for, imported now if it was not."""
        if self._found is None:
            self._finder.end()
            module, name = self._place
            found: Any = getattr(import_module(module), name)
            object.__setattr__(self, "_found", found if self._call is None else found(*self._call[0], **self._call[1]))
        return self._found

    @property
    def _is_imported(self) -> bool:
        module = sys.modules.get(self._place[0])
        return module is not None and not isinstance(module, _Module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._finder.is_active and self._call is None:
            return _Name(*self._place, self._finder, (args, kwargs))
        return self._real()(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and self._finder.is_active:
            raise AttributeError(name)
        return getattr(self._real(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._real(), name, value)

    def __instancecheck__(self, instance: object) -> bool:
        return self._is_imported and isinstance(instance, self._real())

    def __subclasscheck__(self, subclass: type) -> bool:
        return self._is_imported and issubclass(subclass, self._real())

    def __mro_entries__(self, bases: object) -> tuple[type]:
        return (self._real(),)

    def __enter__(self) -> Any:
        return self._real().__enter__()

    def __exit__(self, *error: Any) -> Any:
        return self._real().__exit__(*error)

    def __or__(self, other: Any) -> Any:
        return Any if self._finder.is_active else self._real() | other  # in an annotation

    def __ror__(self, other: Any) -> Any:
        return Any if self._finder.is_active else other | self._real()

    def __eq__(self, other: object) -> bool:
        return self is other or self._real() == other

    def __hash__(self) -> int:
        return hash(self._real())

    def __reduce__(self) -> Any:
        return _itself, (self._real(),)

    def __deepcopy__(self, memo: object) -> Any:
        return deepcopy(self._real())
