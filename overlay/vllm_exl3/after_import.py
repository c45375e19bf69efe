"""Run a function right after a module was imported, or at once if it already is."""

import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from types import ModuleType

Action = Callable[[ModuleType], None]


class _Finder(MetaPathFinder):
    """Lets the other finders find a watched module and appends its actions to the module's execution."""

    def __init__(self) -> None:
        self.actions: dict[str, list[Action]] = {}

    def find_spec(self, fullname, path, target=None):
        if fullname not in self.actions:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None:
                self._extend_loader(spec.loader, fullname)
                return spec
        return None

    def _extend_loader(self, loader, fullname: str) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            for action in self.actions.pop(fullname, ()):
                action(module)

        loader.exec_module = exec_module


_finder = _Finder()


def after_import(name: str, action: Action) -> None:
    """Call `action(module)` once, as soon as the module `name` is there. An error stops the import."""
    module = sys.modules.get(name)
    if module is not None and not _is_initializing(module):
        action(module)
        return
    _finder.actions.setdefault(name, []).append(action)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def _is_initializing(module: ModuleType) -> bool:
    return getattr(getattr(module, "__spec__", None), "_initializing", False)
