"""Packages that a process of the command line does without: nobody else's code runs in it that could miss them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any, cast

_COMPILER, _IN_COMPILER = "torch._dynamo", "torch._dynamo._trace_wrapped_higher_order_op"
_DISTRIBUTED = "is_torch_distributed_available"


def spare(package: str) -> None:
    """Let importing a package fail from now on, unless it is there already; transformers then goes on without it.

    Without models torch is a second and 200 MB for a tokenizer.
    """
    # `import torch` fails where sys.modules says None.
    cast("dict[str, ModuleType | None]", sys.modules).setdefault(package, None)


def spare_compiler() -> None:
    """Let transformers be imported without torch's compiler and its tensors over several machines: a second and 65 MB.

    transformers marks functions for `torch.compile` as it is imported, and nothing here is compiled. If something asks
    for more of the compiler after all, it is imported then.
    """
    if _COMPILER in sys.modules:
        return
    marks: Mapping[str, Any] = dict.fromkeys(("allow_in_graph", "assume_constant_result", "disable"), _unmarked)
    sys.modules[_COMPILER] = _Deferred(_COMPILER, marks)
    sys.modules[_IN_COMPILER] = _Deferred(_IN_COMPILER, {"TransformGetItemToIndex": _as_index})
    sys.meta_path.insert(0, _BeforeModels())


class _Deferred(ModuleType):
    """Stands in for a module until something of it is asked for that `own` does not have."""

    def __init__(self, name: str, own: Mapping[str, Callable[..., Any]]) -> None:
        super().__init__(name)
        self.__dict__.update(own)

    def __getattr__(self, name: str) -> Any:
        # Whoever looks through all modules asks for such names; the import of a submodule needs its package's path.
        if name.startswith("__") and (self.__name__, name) != (_COMPILER, "__path__"):
            raise AttributeError(name)
        return getattr(_real(self.__name__), name)


def _real(name: str) -> ModuleType:
    """Import a module that something stands in for."""
    for deferred in (_COMPILER, _IN_COMPILER):
        if isinstance(sys.modules.get(deferred), _Deferred):
            del sys.modules[deferred]
    return import_module(name)


def _as_index() -> Any:
    """Return a context in which a tensor is taken for an index, for masks that are computed element by element."""
    return _real(_IN_COMPILER).TransformGetItemToIndex()


def _unmarked(function: Callable[..., Any] | None = None, *_: Any, **__: Any) -> Any:
    """Return the function that a mark of the compiler is set on, or the decorator that would set it."""
    return _unmarked if function is None else function


class _BeforeModels(MetaPathFinder):
    """Tells transformers, before the first module of its models is imported, that torch has nothing distributed."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        """Find nothing, as the finders behind it do that."""
        if fullname.startswith(("transformers.distributed", "transformers.modeling_utils")):
            sys.meta_path.remove(self)
            for place in ("transformers.utils", "transformers.utils.import_utils"):
                setattr(import_module(place), _DISTRIBUTED, _no)


def _no() -> bool:
    return False
