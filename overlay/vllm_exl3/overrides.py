"""Named overrides of vLLM: what is replaced, why, until when, and a check that it is still what it was.

Only where vLLM has no seam. The tables are `glm5_next.TABLE` (every platform), `cpu.overrides.TABLE`, and those of
`guards`.
"""

import ast
import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from vllm_exl3.after_import import after_import


@dataclass(frozen=True)
class Override:
    """One replaced attribute of vLLM."""

    module: str
    attribute: str  # dotted below the module
    why: str
    until: str  # what has to happen for this entry to go
    known: tuple[str, ...]  # fingerprints of the target that the replacement was written for
    replace: Callable[[Any], Any]  # from the original to its replacement

    @property
    def name(self) -> str:
        return f"{self.module}:{self.attribute}"


def instead(replacement: Any) -> Callable[[Any], Any]:
    """A replacement that does not need the original."""
    return lambda _original: replacement


def unchanged(original: Any) -> Any:
    """For a target that is only checked (`require`)."""
    return original


def because(
    why: str, until: str, module: str, *entries: tuple[str, str | tuple[str, ...], Callable[[Any], Any]]
) -> list[Override]:
    """Overrides that share a reason and a module: (attribute, fingerprint or several, replacement) each."""
    return [
        Override(module, attribute, why, until, (known,) if isinstance(known, str) else known, replace)
        for attribute, known, replace in entries
    ]


_installed: set[Override] = set()


def install(table: Iterable[Override]) -> None:
    """Replace every target of the table, each once per process."""
    for override in table:
        if override not in _installed:
            _installed.add(override)
            after_import(override.module, lambda module, override=override: apply(override, module))


def apply(override: Override, module: ModuleType) -> None:
    holder, original = check(override, module)
    setattr(holder, override.attribute.rpartition(".")[2], override.replace(original))


def check(override: Override, module: ModuleType) -> tuple[Any, Any]:
    """(what holds the target, the target). Raises RuntimeError if it is not what the override was written for."""
    holder, target = None, module
    for name in override.attribute.split("."):
        holder, target = target, _get(override, target, name)
    seen = fingerprint(target)
    if seen not in override.known:
        raise RuntimeError(_changed(override, f"its source has the fingerprint {seen}"))
    return holder, target


def require(table: Iterable[Override]) -> None:
    """Check every target and change none: for what is extended rather than replaced."""
    for override in table:
        check(override, importlib.import_module(override.module))


def _get(override: Override, holder: Any, name: str) -> Any:
    if not hasattr(holder, name):
        raise RuntimeError(_changed(override, f"there is no {name}"))
    return getattr(holder, name)


def _changed(override: Override, seen: str) -> str:
    import vllm

    return (
        f"{override.name} of vLLM {vllm.__version__} is not what the override was written for: {seen}, known "
        f"are {', '.join(override.known)}. It is replaced or extended because {override.why}. Install the vLLM version "
        f"of requirements/, or review the override and add the fingerprint."
    )


def fingerprint(target: Any) -> str:
    """A short hash of the target's source text; of its value where it is plain data."""
    if isinstance(target, (str, int, float, bool, type(None))):
        return _hash(repr(target))
    try:
        return _hash(inspect.getsource(_definition(target)))
    except (OSError, TypeError):
        return "(no source)"


def source_fingerprint(override: Override) -> str | None:
    """`fingerprint` of a function or class that is not imported, from its file; None where it is not there."""
    return _source_fingerprint(override.module, override.attribute.split("."))


def _source_fingerprint(module: str, names: list[str]) -> str | None:
    package, *folders = module.split(".")
    spec = importlib.util.find_spec(package)
    path = Path(*(spec.submodule_search_locations if spec else ["."]), *folders).with_suffix(".py")
    if not path.is_file():
        return None
    text = path.read_text(encoding="utf-8")
    node: ast.AST = ast.parse(text)
    if origin := _imported_from(node, names[0]):
        return _source_fingerprint(origin, names)
    for name in names:
        named = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
        node = next((one for one in node.body if isinstance(one, named) and one.name == name), None)
        if node is None:
            return None
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return _hash("".join(text.splitlines(keepends=True)[first - 1 : node.end_lineno]))


def _imported_from(module: ast.Module, name: str) -> str | None:
    """The module from which a name comes by an absolute import under the same name."""
    for one in module.body:
        if isinstance(one, ast.ImportFrom) and not one.level:
            if name in [alias.name for alias in one.names if not alias.asname]:
                return one.module
    return None


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _definition(target: Any) -> Any:
    """The function or class that was written down: below decorators; an object's module for an object."""
    target = inspect.unwrap(target)
    if inspect.isroutine(target) or inspect.isclass(target):
        return target
    return sys.modules[target.__module__]
