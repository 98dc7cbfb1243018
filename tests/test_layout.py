"""Holds the tree to the rules marked [L] in our house style: shape, direction, and where effects may happen.

A rule is a pure function from the modules, as syntax trees, to findings `path:line: what`; the last tests plant one violation of each.
"""

import ast
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("videogen", "caches", "lora", "eval", "app")
MAX_FILE_LINES, MAX_FUNCTION_LINES = 300, 60
MAX_TREE_BYTES, MAX_WEIGHTS_BYTES = 44_000_000, 36_000_000
CODE = {"videogen", "caches", "lora", "eval", "tests"}
TOP_LEVEL = {*CODE, "pyproject.toml", "README.md", "LICENSE", "Makefile", "constraints.txt"}
TOP_LEVEL_OPTIONAL = {"app.py", "CHANGELOG.md", "docs", ".ci", ".gitignore"}

MAY_IMPORT = {  # package -> the packages of ours it may import
    "caches": {"caches"},
    "lora": {"lora"},
    "videogen": {"videogen", "caches", "lora"},
    "eval": {"eval", "videogen", "caches", "lora"},
    "app": {"app", "videogen", "caches", "lora"},
}
CLI = ("videogen/cli/*", "videogen/__main__.py")
ABOVE_PIPELINE = (*CLI, "videogen/__init__.py", "videogen/pipeline*", "videogen/jobs/worker.py", "videogen/serve/*", "eval/*", "app.py")
MAY_PRINT = (*CLI, "videogen/pocket/train_*.py", "videogen/pocket/build.py")  # the two in pocket are commands
MAY_BE_LAZY = ("videogen/cli/*", "videogen/pipeline.py", "videogen/__init__.py", "eval/*")
OPTIONAL_KERNELS = {"triton", "xformers", "flash_attn", "flash_attn_interface", "sageattention"}
MAY_READ_ENVIRONMENT = ("videogen/config.py",)
DECISIONS = (
    *("caches/policy.py", "caches/calibrate.py", "caches/audit.py", "lora/contract.py", "videogen/parallel/plan.py"),
    *("videogen/jobs/plan.py", "videogen/config.py", "videogen/recipes.py", "videogen/images.py", "videogen/media.py", "app.py"),
)
BRINGS_TORCH = {"torch", "torchvision", "diffusers", "transformers", "accelerate", "peft"}


@dataclass(frozen=True)
class Import:
    line: int
    target: str  # "a.b" for `import a.b`, `from a import b` and `import_module("a.b")`
    is_lazy: bool = False  # inside a function
    is_typing: bool = False  # under `if TYPE_CHECKING`
    is_dynamic: bool = False  # through import_module


@dataclass(frozen=True)
class Module:
    path: str
    source: str
    tree: ast.Module

    @property
    def name(self) -> str:
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    def among(self, patterns: tuple[str, ...]) -> bool:
        return any(fnmatch(self.path, pattern) for pattern in patterns)

    def imports(self) -> list[Import]:
        return list(find_imports(self.tree, False, False))


Rule = Callable[[list[Module]], Iterator[str]]


def read_tree(root: Path) -> list[Module]:
    paths = sorted(path for top in PACKAGES for path in (*root.glob(f"{top}/**/*.py"), *root.glob(f"{top}.py")))
    return [Module(path.relative_to(root).as_posix(), text, ast.parse(text, str(path))) for path in paths for text in [path.read_text()]]


def find_imports(node: ast.AST, lazy: bool, typing: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(child.lineno, alias.name, lazy, typing) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            origin = "." * child.level + (child.module or "")
            yield from (Import(child.lineno, f"{origin}.{alias.name}", lazy, typing) for alias in child.names)
        elif isinstance(child, ast.Call) and dotted(child.func).endswith("import_module") and isinstance(child.args[0], ast.Constant):
            yield Import(child.lineno, str(child.args[0].value), lazy, typing, True)
        is_guard = isinstance(child, ast.If) and dotted(child.test).endswith("TYPE_CHECKING")
        is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield from find_imports(child, lazy or is_function, typing or is_guard)


def dotted(node: ast.AST) -> str:
    """`a.b.c` of a chain of names, else the empty string."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}" if dotted(node.value) else ""
    return node.id if isinstance(node, ast.Name) else ""


def lies_in(target: str, module: str) -> bool:
    return target == module or target.startswith(f"{module}.")


def graph(modules: list[Module]) -> dict[str, dict[str, int]]:
    """Module -> the modules, ours or not, that importing it imports, each with a line."""
    names = {module.name for module in modules}

    def resolve(target: str) -> str:
        return target if target in names else target.rpartition(".")[0] if target.rpartition(".")[0] in names else target

    return {
        module.name: {resolve(each.target): each.line for each in module.imports() if not each.is_lazy and not each.is_typing}
        for module in modules
    }


def file_length(modules: list[Module]) -> Iterator[str]:
    for module in modules:
        lines = len(module.source.splitlines())
        if lines > MAX_FILE_LINES:
            yield f"{module.path}:{lines}: {lines} lines, at most {MAX_FILE_LINES}: it holds two ideas"


def function_length(modules: list[Module]) -> Iterator[str]:
    for module in modules:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    yield f"{module.path}:{node.lineno}: {node.name} has {lines} lines, at most {MAX_FUNCTION_LINES}"


def module_docstring(modules: list[Module]) -> Iterator[str]:
    for module in modules:
        is_empty_package = module.path.endswith("__init__.py") and not module.tree.body
        if not is_empty_package and not (ast.get_docstring(module.tree) or "").strip():
            yield f"{module.path}:1: no module docstring: say what it does and what it does not know"


def direction(modules: list[Module]) -> Iterator[str]:
    for module in modules:
        package = module.name.partition(".")[0]
        for each in module.imports():
            other = each.target.partition(".")[0]
            is_command = each.is_dynamic and module.among(CLI)  # a sub-command may run an eval command by name
            if other in PACKAGES and other not in MAY_IMPORT[package] and not is_command:
                yield f"{module.path}:{each.line}: {package} may not import {other}"


def composition_root(modules: list[Module]) -> Iterator[str]:
    for module in modules:
        for each in module.imports():
            if lies_in(each.target, "videogen.pipeline") and not module.among(ABOVE_PIPELINE):
                yield f"{module.path}:{each.line}: imports the composition root; take what you need as an argument"
            if lies_in(each.target, "videogen.cli") and not module.among(CLI):
                yield f"{module.path}:{each.line}: only videogen.cli and videogen.__main__ import the command line"


def absolute_imports(modules: list[Module]) -> Iterator[str]:
    for module in modules:
        for each in module.imports():
            if each.target.startswith("."):
                yield f"{module.path}:{each.line}: relative import"
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Import) and any(lies_in(alias.name, "eval") and not alias.asname for alias in node.names):
                yield f"{module.path}:{node.lineno}: `import eval` hides the builtin; use `from eval.x import y`"


def no_cycles(modules: list[Module]) -> Iterator[str]:
    edges, paths = graph(modules), {module.name: module.path for module in modules}
    finished: set[str] = set()

    def visit(name: str, trail: list[str]) -> Iterator[str]:
        for target, line in edges[name].items():
            if target in trail:
                yield f"{paths[name]}:{line}: import cycle {' -> '.join([*trail[trail.index(target) :], target])}"
            elif target in edges and target not in finished:
                yield from visit(target, [*trail, target])
        finished.add(name)

    for name in edges:
        if name not in finished:
            yield from visit(name, [name])


def lazy_imports(modules: list[Module]) -> Iterator[str]:
    for module in modules:
        for each in module.imports():
            if each.is_lazy and not module.among(MAY_BE_LAZY) and each.target.partition(".")[0] not in OPTIONAL_KERNELS:
                yield f"{module.path}:{each.line}: import of {each.target} inside a function"


def torch_free_decisions(modules: list[Module]) -> Iterator[str]:
    """Followed through our own modules: what a decision file imports is what `--dry-run` waits for."""
    edges = graph(modules)

    def reaches(name: str, seen: set[str]) -> str:
        for target in edges[name]:
            if target.partition(".")[0] in BRINGS_TORCH:
                return f"{name} -> {target}"
            if target in edges and target not in seen:
                seen.add(target)
                if found := reaches(target, seen):
                    return f"{name} -> {found}"
        return ""

    for module in modules:
        if module.among(DECISIONS) and (found := reaches(module.name, {module.name})):
            line = edges[module.name][found.split(" -> ")[1]]
            yield f"{module.path}:{line}: a decision file loads torch: {found}"


def broad_except(modules: list[Module]) -> Iterator[str]:
    for module in modules:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ExceptHandler) and is_broad(node.type) and not isinstance(node.body[-1], ast.Raise):
                yield f"{module.path}:{node.lineno}: broad except that does not end by raising; name the errors"
            if isinstance(node, ast.Call) and dotted(node.func).endswith("suppress") and any(map(is_broad, node.args)):
                yield f"{module.path}:{node.lineno}: broad suppress; name the errors"


def is_broad(caught: ast.expr | None) -> bool:
    if isinstance(caught, ast.Tuple):
        return any(map(is_broad, caught.elts))
    return caught is None or dotted(caught).rpartition(".")[2] in ("Exception", "BaseException")


def output_and_exit(modules: list[Module]) -> Iterator[str]:
    calls = {"print", "exit", "quit", "sys.exit", "os._exit", "sys.stdout.write", "sys.stderr.write"}
    for module in modules:
        if module.among(MAY_PRINT):
            continue
        for node in ast.walk(module.tree):
            if (isinstance(node, ast.Call) and dotted(node.func) in calls) or (isinstance(node, ast.Name) and node.id == "SystemExit"):
                name = dotted(node.func) if isinstance(node, ast.Call) else "SystemExit"
                yield f"{module.path}:{node.lineno}: {name}; only videogen/cli prints and exits, others log or raise"
        for each in module.imports():
            if each.target in ("sys.exit", "sys.stdout", "sys.stderr"):
                yield f"{module.path}:{each.line}: takes {each.target}; only videogen/cli prints and exits"


def environment(modules: list[Module]) -> Iterator[str]:
    names = {"os.environ", "os.environb", "os.getenv", "os.putenv"}
    for module in modules:
        if module.among(MAY_READ_ENVIRONMENT):
            continue
        lines = {node.lineno for node in ast.walk(module.tree) if isinstance(node, ast.Attribute) and dotted(node) in names}
        lines |= {each.line for each in module.imports() if each.target in names}
        yield from (f"{module.path}:{line}: environment variables belong in videogen/config.py" for line in sorted(lines))


RULES: tuple[Rule, ...] = (
    *(file_length, function_length, module_docstring, direction, composition_root, absolute_imports, no_cycles),
    *(lazy_imports, torch_free_decisions, broad_except, output_and_exit, environment),
)


@pytest.fixture(scope="module")
def tree() -> list[Module]:
    return read_tree(ROOT)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_tree_keeps(rule: Rule, tree: list[Module]) -> None:
    findings = list(rule(tree))
    assert not findings, "\n" + "\n".join(findings)


def tracked() -> list[Path]:
    """The files git tracks; without a checkout (an installed copy) there is nothing to hold to."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    files = [Path(name) for name in listed.stdout.decode().split("\0") if name]
    if listed.returncode != 0 or not files:
        pytest.skip("git tracks nothing here")
    return [file for file in files if (ROOT / file).is_file()]


def test_the_top_level_is_fixed() -> None:
    tops = {file.parts[0] for file in tracked()}
    assert tops - TOP_LEVEL - TOP_LEVEL_OPTIONAL == set(), "tracked at the top level, but not part of the layout"
    assert TOP_LEVEL - tops == set(), "part of the layout, but not tracked"


def test_the_tracked_tree_is_small() -> None:
    sizes = {file: (ROOT / file).stat().st_size for file in tracked()}
    weights = sum(size for file, size in sizes.items() if file.is_relative_to("videogen/pocket/weights"))
    assert weights <= MAX_WEIGHTS_BYTES and sum(sizes.values()) < MAX_TREE_BYTES, sorted(sizes.items(), key=lambda item: -item[1])[:5]


@pytest.mark.parametrize(("name", "most"), [("README.md", 120), ("docs/structure.md", 60)])
def test_documents_stay_short(name: str, most: int) -> None:
    path = ROOT / name
    lines = len(path.read_text().splitlines()) if path.exists() else 0
    assert lines <= most, f"{name}:{lines}: {lines} lines, at most {most}"


DOC = '"""What it does."""\n'
PLANTS: tuple[tuple[Rule, str, str, int], ...] = (
    (file_length, "caches/x.py", DOC + "a = 1\n" * 300, 301),
    (function_length, "caches/x.py", DOC + "class A:\n    def f():\n" + "        a = 1\n" * 60, 3),
    (module_docstring, "caches/x.py", "a = 1\n", 1),
    (module_docstring, "caches/x.py", '"""  """\n', 1),
    (module_docstring, "caches/__init__.py", "a = 1\n", 1),
    (direction, "caches/x.py", DOC + "import videogen.errors\n", 2),
    (direction, "lora/x.py", DOC + "from caches import policy\n", 2),
    (direction, "videogen/x.py", DOC + "def f():\n    from eval.stats import mean\n", 3),
    (direction, "videogen/x.py", DOC + "import importlib\nimportlib.import_module('app')\n", 3),
    (direction, "videogen/cli/x.py", DOC + "from eval import stats\n", 2),
    (composition_root, "videogen/families/x.py", DOC + "from videogen import pipeline\n", 2),
    (composition_root, "caches/x.py", DOC + "from videogen.pipeline import Pipeline\n", 2),
    (composition_root, "videogen/jobs/x.py", DOC + "import videogen.cli.main\n", 2),
    (absolute_imports, "caches/x.py", DOC + "from . import policy\n", 2),
    (absolute_imports, "eval/x.py", DOC + "import eval.stats\n", 2),
    (lazy_imports, "caches/x.py", DOC + "def f():\n    if f:\n        import numpy\n", 4),
    (lazy_imports, "videogen/x.py", DOC + "async def f():\n    import_module('numpy')\n", 3),
    (torch_free_decisions, "caches/policy.py", DOC + "import math\nimport torch.nn\n", 3),
    (broad_except, "caches/x.py", DOC + "try:\n    f()\nexcept:\n    pass\n", 4),
    (broad_except, "caches/x.py", DOC + "try:\n    f()\nexcept (KeyError, Exception) as e:\n    log(e)\n", 4),
    (broad_except, "caches/x.py", DOC + "with contextlib.suppress(Exception):\n    f()\n", 2),
    (output_and_exit, "eval/x.py", DOC + "print('a')\n", 2),
    (output_and_exit, "videogen/x.py", DOC + "import sys\nsys.exit(1)\n", 3),
    (output_and_exit, "videogen/x.py", DOC + "raise SystemExit(1)\n", 2),
    (output_and_exit, "caches/x.py", DOC + "from sys import stdout\n", 2),
    (output_and_exit, "videogen/pocket/world.py", DOC + "sys.stderr.write('a')\n", 2),
    (environment, "app.py", DOC + "import os\na = os.environ['A']\n", 3),
    (environment, "videogen/cli/x.py", DOC + "os.getenv('A')\n", 2),
    (environment, "lora/x.py", DOC + "from os import environ\n", 2),
)


def plant(root: Path, files: dict[str, str]) -> list[Module]:
    for path, source in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(source)
    return read_tree(root)


@pytest.mark.parametrize(("rule", "path", "source", "line"), PLANTS)
def test_a_planted_violation_is_caught(tmp_path: Path, rule: Rule, path: str, source: str, line: int) -> None:
    (finding,) = rule(plant(tmp_path, {path: source}))
    assert finding.startswith(f"{path}:{line}: ")


def test_a_planted_cycle_and_a_hidden_torch_are_caught(tmp_path: Path) -> None:
    modules = plant(
        tmp_path,
        {
            "caches/policy.py": DOC + "from caches.a import f\n",
            "caches/a.py": DOC + "from caches import b\n",
            "caches/b.py": DOC + "import torch\nfrom caches.a import g\n",
        },
    )
    assert list(no_cycles(modules)) == ["caches/b.py:3: import cycle caches.a -> caches.b -> caches.a"]
    chain = "caches.policy -> caches.a -> caches.b -> torch"
    assert list(torch_free_decisions(modules)) == [f"caches/policy.py:2: a decision file loads torch: {chain}"]


def test_what_the_rules_allow_is_left_alone(tmp_path: Path) -> None:
    kernel = "def f():\n    import triton.language\n"
    typing = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from caches.policy import Budget\n"
    undo = "try:\n    f()\nexcept BaseException:\n    undo()\n    raise\n"
    modules = plant(
        tmp_path,
        {
            "caches/__init__.py": "",
            "caches/policy.py": DOC + "from caches.drift import f\n" + "a = 1\n" * 298,
            "caches/drift.py": DOC + typing + kernel + undo + "def g():\n" + "    a = 1\n" * 59,
            "videogen/cli/x.py": DOC + "import sys\nprint(1)\nsys.exit(import_module('eval.run').main())\n",
            "videogen/pocket/train_vae.py": DOC + "print(1)\n",
            "videogen/config.py": DOC + "import os\nos.environ.get('A')\n",
            "videogen/jobs/worker.py": DOC + "from videogen.pipeline import Pipeline\n",
            "eval/x.py": DOC + "from eval.stats import mean\ndef f():\n    import scipy\n",
        },
    )
    assert [finding for rule in RULES for finding in rule(modules)] == []
