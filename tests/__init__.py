"""Tests. While they run, also on rank processes, every call into a module that declares shapes checks them."""

from functools import partial
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
from unittest.mock import patch

from jaxtyping import _import_hook, install_import_hook

_ROOT = Path(__file__).resolve().parent.parent
_WITH_SHAPES = [
    ".".join(file.relative_to(_ROOT).with_suffix("").parts)
    for file in (_ROOT / "stack").rglob("*.py")
    if "from jaxtyping import" in file.read_text()
]


class _Loader(_import_hook._JaxtypingLoader):
    """jaxtyping 0.3 renames compiled files for as long as a module runs, so also those of all that it imports: where Python
    may not write such files, each process compiled torch and transformers anew, 7 of its first 18 s."""

    def get_code(self, fullname: str) -> CodeType | None:
        name = partial(_import_hook._optimized_cache_from_source, self._typechecker.get_hash())
        with patch("importlib._bootstrap_external.cache_from_source", name):
            return super().get_code(fullname)

    exec_module = SourceFileLoader.exec_module


_import_hook._JaxtypingLoader = _Loader
install_import_hook(_WITH_SHAPES, "beartype.beartype")
