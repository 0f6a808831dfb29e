"""Tests. While they run, also on rank processes, every call into a module that declares shapes checks them."""

from pathlib import Path

from jaxtyping import install_import_hook

_ROOT = Path(__file__).resolve().parent.parent
_WITH_SHAPES = [
    ".".join(file.relative_to(_ROOT).with_suffix("").parts)
    for file in (_ROOT / "stack").rglob("*.py")
    if "from jaxtyping import" in file.read_text()
]
install_import_hook(_WITH_SHAPES, "beartype.beartype")
