"""Imports point down: a module may import from its own room and from rooms on lower floors.

Every import counts, also one inside a function or under TYPE_CHECKING: a lower room that needs the
name of an upper one depends on it, whenever the name is looked up.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "outcore"

# From the street to the cellar. Rooms on one floor do not import each other. A room is a module or
# package of outcore with all that is in it; where two fit a module, the longer name counts. The
# front door, outcore/__init__.py, is ".".
FLOORS = (
    ("__main__",),
    ("cli",),
    ("train",),
    ("verify", "bench"),
    (".",),
    ("hf",),
    ("checkpoint",),
    ("engine",),
    ("passes", "weights", "views"),
    ("planning",),
    ("model_spec",),
    ("model_config", "model_directory", "saved_activations", "attention_spec"),
    ("machine",),
    ("optim",),
    ("stream",),
    ("store",),
    ("kernels",),
    ("blocks", "shapes", "adapters"),
    ("store.memory_limits", "memory_limits"),
    ("data",),
    ("limited_json",),
    ("units", "timeline", "random_state", "determinism", "fitting_table", "named_device"),
    ("left_to_python",),
    ("errors",),
)
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}


def module_name(path: Path, package: Path) -> str:
    """`outcore/store/spans.py` → "store.spans", `outcore/store/__init__.py` → "store"."""
    parts = list(path.relative_to(package).with_suffix("").parts)
    if parts[-1] == "__init__":
        parts.pop()
    return ".".join(parts) or "."


def modules_of(package: Path) -> dict[str, Path]:
    return {module_name(path, package): path for path in sorted(package.rglob("*.py"))}


def room_of(module: str) -> str | None:
    if module in FLOOR_OF:
        return module
    parent = module.rpartition(".")[0]
    return room_of(parent) if parent else None


def imported_modules(source: str, module: str, is_package: bool, known: set[str]) -> Iterator[str]:
    """The modules of outcore that `source` imports, by their names without "outcore."."""
    here = ["outcore"] if module == "." else ["outcore", *module.split(".")]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            targets = [(alias.name, None) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            num_dropped = node.level - 1 if is_package else node.level
            base = here[: len(here) - num_dropped] if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])])
            targets = [(name, alias.name) for alias in node.names]
        else:
            continue
        for name, member in targets:
            if name != "outcore" and not name.startswith("outcore."):
                continue
            target = name.removeprefix("outcore").removeprefix(".")
            # `from outcore.store import spans` names a module, `... import Span` does not.
            inner = f"{target}.{member}".removeprefix(".")
            yield inner if member and inner in known else target or "."


def points_down(importer: str, imported: str) -> bool:
    upper, lower = room_of(importer), room_of(imported)
    if upper is None or lower is None:
        return False
    return upper == lower or FLOOR_OF[upper] < FLOOR_OF[lower]


def wrong_imports(source: str, module: str, is_package: bool, known: set[str]) -> list[str]:
    return [
        f"outcore.{module} imports outcore.{target}"
        for target in imported_modules(source, module, is_package, known)
        if not points_down(module, target)
    ]


def test_every_module_belongs_to_a_room() -> None:
    modules = modules_of(PACKAGE)
    assert modules, f"no modules found under {PACKAGE}"
    homeless = [name for name in modules if room_of(name) is None]
    assert not homeless, f"add to FLOORS: {', '.join(homeless)}"


def test_imports_point_down() -> None:
    modules = modules_of(PACKAGE)
    wrong = [
        line
        for name, path in modules.items()
        for line in wrong_imports(
            path.read_text(encoding="utf-8"), name, path.name == "__init__.py", set(modules)
        )
    ]
    assert not wrong, "\n".join(["these imports point up or sideways:", *wrong])


KNOWN = {
    ".",
    "cli",
    "engine",
    "engine.offload",
    "store",
    "store.spans",
    "stream",
    "errors",
    "bench",
}


@pytest.mark.parametrize(
    ("module", "is_package", "source", "expected"),
    [
        # Down, inside a room, and out of the package: nothing to say.
        ("engine.offload", False, "import torch\nfrom outcore.store import spans", []),
        ("engine.offload", False, "from .block_function import Block\nfrom ..errors import E", []),
        ("cli", True, "import outcore\nfrom . import bench", []),
        ("bench", True, "from outcore import offload", []),
        (".", True, "from .engine import offload", []),
        ("store.spans", False, "import outcore_extras", []),
        # Up, in each way that an import can be written.
        ("store.spans", False, "import outcore.engine.offload", ["engine.offload"]),
        ("store.spans", False, "from outcore import engine", ["engine"]),
        ("store.spans", False, "from ..stream import Lane", ["stream"]),
        ("store", True, "from ..stream import Lane", ["stream"]),
        ("store.spans", False, "from .. import stream", ["stream"]),
        ("errors", False, "def f():\n    from .store import spans", ["store.spans"]),
        ("errors", False, "if TYPE_CHECKING:\n    import outcore", ["."]),
        (".", True, "from .cli import main", ["cli"]),
        # Sideways, and to a module that has no room.
        ("verify", True, "from outcore.bench import run", ["bench"]),
        ("cli", True, "import outcore.cellar", ["cellar"]),
    ],
)
def test_the_check_itself(module: str, is_package: bool, source: str, expected: list[str]) -> None:
    found = wrong_imports(source, module, is_package, KNOWN)
    assert found == [f"outcore.{module} imports outcore.{target}" for target in expected]


def test_names_and_rooms_of_a_made_up_package(tmp_path: Path) -> None:
    for name in ("__init__.py", "errors.py", "store/__init__.py", "store/memory_limits.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "cellar.py").touch()
    rooms = {name: room_of(name) for name in modules_of(tmp_path)}
    assert rooms == {
        ".": ".",
        "cellar": None,
        "errors": "errors",
        "store": "store",
        "store.memory_limits": "store.memory_limits",
    }
