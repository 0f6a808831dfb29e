"""The layout that keeps the stack readable: one import direction, fenced packages, small files, nothing left lying about."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from jaxtyping import TypeCheckError

from stack.data.batch import MicroBatch

ROOT = Path(__file__).resolve().parent.parent.parent
STACK = ROOT / "stack"

# A folder may import those in the groups behind its own, not its neighbours in the same group.
ORDER = (
    {"launch"},
    {"train", "bench", "submit"},
    {"checkpoint"},
    {"engine"},
    {"parallel", "methods", "rollout", "plan"},
    {"models", "data"},
    {"dist", "ops"},
    {"config"},
)
OWN_IMPORTS = {"plan": {"models", "config"}}  # it answers in a second, so nothing that brings torch
EVERYWHERE = {"errors", "patches"}
FENCES = {
    "hydra": {"config/compose.py", "launch"},
    "omegaconf": {"config/compose.py", "launch"},
    "wandb": {"train/wandb.py"},
    # bench/baseline.py is made of the libraries' own pieces, for comparison
    "deepspeed": {"engine", "dist", "parallel", "checkpoint", "patches.py", "bench/baseline.py"},
    "transformers": {
        "models", "data", "parallel", "rollout", "checkpoint/export_hf.py", "engine/schedule.py", "bench/baseline.py",
        "patches.py",
    },
}  # fmt: skip
WITHOUT_TORCH = {"config"}
FOLDERS = ("stack", "launch", "conf", "tests", "ds_configs", ".ci")
TEXTS = {"", ".py", ".md", ".yaml", ".toml", ".json", ".sbatch"}
MAX_LINES, MAX_FUNCTION, MAX_LAUNCH = 400, 60, 60


def sources() -> list[Path]:
    return sorted([*STACK.rglob("*.py"), *(ROOT / "launch").glob("*.py")])


def place(file: Path) -> str:
    """`stack/models/spec.py` -> `models/spec.py`; `launch/train.py` stays."""
    return file.relative_to(STACK if file.is_relative_to(STACK) else ROOT).as_posix()


def imports(tree: ast.AST) -> Iterator[str]:
    """Full names of all imported modules, also those inside functions and under TYPE_CHECKING."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the direction"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def allowed(folder: str) -> set[str]:
    """Folders of the stack that this one may import."""
    if folder in OWN_IMPORTS:
        return OWN_IMPORTS[folder] | EVERYWHERE | {folder}
    level = next((index for index, group in enumerate(ORDER) if folder in group), None)
    assert level is not None, f"stack/{folder} has no place in the import order"
    return set().union(*ORDER[level + 1 :]) | EVERYWHERE | {folder}


def within(where: str, fence: set[str]) -> bool:
    return any(where == part or where.startswith(f"{part}/") for part in fence)


@pytest.mark.parametrize("file", sources(), ids=place)
def test_imports_go_one_way_and_stay_inside_the_fences(file: Path) -> None:
    where = place(file)
    parts = where.split("/")
    wrong = []
    for name in imports(ast.parse(file.read_text())):
        top, *rest = name.split(".")
        if top == "stack" and len(parts) > 1:
            if rest and rest[0] not in allowed(parts[0]):
                wrong.append(name)
        elif top == "stack" and where not in ("__init__.py", "patches.py", "errors.py"):
            wrong.append(f"{name}: a file of its own at the top of stack/")
        elif top in FENCES and not within(where, FENCES[top]):
            wrong.append(f"{name}: allowed only in {sorted(FENCES[top])}")
        elif top == "torch" and within(where, WITHOUT_TORCH):
            wrong.append(f"{name}: would make --help slow")
    assert not wrong


def test_rules_can_fail() -> None:
    """The checks above on sources that break them."""
    assert "models" in allowed("engine") and "train" not in allowed("engine")
    assert (
        "engine" in allowed("bench") and "train" not in allowed("bench") and "bench" not in allowed("train")
    )
    assert "methods" not in allowed("parallel") and "data" not in allowed("models")
    assert set(imports(ast.parse("def f():\n    from stack.train.run import run\n    import wandb"))) == {
        "stack.train.run.run",
        "wandb",
    }
    assert within("train/wandb.py", FENCES["wandb"]) and not within("train/loop.py", FENCES["wandb"])
    assert not within("engineering/x.py", FENCES["deepspeed"])
    with pytest.raises(AssertionError, match="no place"):
        allowed("utils")


def test_no_two_folders_import_each_other() -> None:
    edges = set()
    for file in STACK.rglob("*/*.py"):
        here = place(file).split("/")[0]
        for name in imports(ast.parse(file.read_text())):
            top, *rest = name.split(".")
            if top == "stack" and rest and rest[0] not in EVERYWHERE | {here}:
                edges.add((here, rest[0]))
    assert not [(a, b) for a, b in edges if (b, a) in edges]


def test_errors_and_patches_import_nothing_of_the_stack() -> None:
    for name in EVERYWHERE:
        tree = ast.parse((STACK / f"{name}.py").read_text())
        assert not [
            module
            for module in imports(tree)
            if module.startswith("stack.") and not module.startswith("stack.errors")
        ]


@pytest.mark.parametrize("file", [*sources(), *sorted((ROOT / "tests").rglob("*.py"))], ids=str)
def test_files_and_functions_are_small(file: Path) -> None:
    source = file.read_text()
    lines = source.count("\n")
    assert lines <= (MAX_LAUNCH if file.parent.name == "launch" else MAX_LINES)
    tree = ast.parse(source)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    long = [
        f"{f.name}: {length}"
        for f in functions
        if (length := (f.end_lineno or 0) - f.lineno + 1) > MAX_FUNCTION
    ]
    assert not long
    if lines:
        assert ast.get_docstring(tree), "a file says what it is for"


def test_folders_say_what_they_are_for() -> None:
    for folder in (path for path in [STACK, *STACK.rglob("*")] if path.is_dir() and any(path.glob("*.py"))):
        assert ast.get_docstring(ast.parse((folder / "__init__.py").read_text())), folder
    vague = {"utils.py", "util.py", "helpers.py", "misc.py", "common.py"}
    assert not [file for file in sources() if file.name in vague]


def test_nothing_is_left_lying_about() -> None:
    """No marks of unfinished work, no paths of one machine, no switched-off checks without a reason."""
    files = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*")] + list(ROOT.glob("*"))
    marks = re.compile(
        "|".join(["TO" + "DO", "FIX" + "ME", "XX" + "X", r"(?<![\w.$}])/(?:home|root|work|Users)/"])
    )
    bare = re.compile(r"#\s*(?:noqa|type: ignore)\s*$|except\s*(?:BaseException|Exception)?:\s*$")
    found = []
    for file in files:
        if not file.is_file() or file.suffix not in TEXTS:
            continue
        lines = file.read_text(errors="replace").splitlines()
        for number, (line, following) in enumerate(itertools.pairwise([*lines, ""]), start=1):
            unexplained = (
                file.suffix == ".py" and bare.search(line) and not following.lstrip().startswith("#")
            )
            if marks.search(line) or unexplained:
                found.append(f"{file.relative_to(ROOT)}:{number}: {line.strip()}")
    assert not found


def test_declared_shapes_are_checked_while_tests_run() -> None:
    """`tests/__init__.py` sees to it; without the check a declared shape would be a comment."""
    rows = torch.zeros(2, 3, dtype=torch.int64)
    MicroBatch(rows, rows, rows, torch.zeros(2, dtype=torch.int32))
    with pytest.raises(TypeCheckError):
        MicroBatch(rows, rows[:, :2], rows, torch.zeros(2, dtype=torch.int32))
