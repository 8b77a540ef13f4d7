"""Imports run one way, load nothing optional, and never fail for what is missing."""

import ast
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "mlakit"
BASE = "errors locks datafiles versions shapes archs context records rounding inputs formats"
LAYERS = [
    set(BASE.split()),
    {"paths"},
    {"launches", "latency"},
    {"dispatch"},
    {"codegen", "timing", "models"},
    {"drift", "sweep"},
    {"plots", "plot_style"},
    {"report", "widgets"},
    {"cli", "__init__", "__main__"},
]
OPTIONAL = (
    "triton numba aiter transformers dask distributed matplotlib papermill nbconvert nbformat "
    "nbclient IPython ipywidgets liger_kernel quack flashinfer ml_dtypes"
).split()
MODULES = sorted(
    ".".join(("mlakit", *p.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")
    for p in PACKAGE.rglob("*.py")
)


def layer(top: str) -> int:
    return next(i for i, names in enumerate(LAYERS) if top in names)


def test_nothing_imports_to_its_right():
    wrong = []
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        mine = layer(parts[0])
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.ImportFrom) and node.module:
                if node.module == "mlakit":
                    names = [f"mlakit.{a.name}" for a in node.names]
                else:
                    names = [node.module]
            elif isinstance(node, ast.Import):
                names = [a.name for a in node.names]
            for name in names:
                bits = name.split(".")
                if bits[0] == "mlakit" and len(bits) > 1 and bits[1] != "__version__":
                    known = any(bits[1] in names for names in LAYERS)
                    if not known or layer(bits[1]) > mine:
                        wrong.append(f"{'.'.join(parts)} imports {name}")
    assert not wrong, wrong


def run(code: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )


def test_import_loads_no_optional_package_and_no_driver():
    done = run(
        "import sys, mlakit, torch\n"
        f"loaded = [m for m in {OPTIONAL!r} + ['pydantic'] if m in sys.modules]\n"
        "assert not loaded, loaded\n"
        "assert not torch.cuda.is_initialized()"
    )
    assert done.returncode == 0, done.stderr


def test_the_public_names_load_in_no_time():
    """Their own modules and nothing slow: dynamo alone takes two seconds to import."""
    slow = ["torch._dynamo", "torch._inductor", "sympy", "scipy.stats", "triton", "pydantic"]
    done = run(
        "import sys, torch; before = set(sys.modules)\n"
        "import mlakit; [getattr(mlakit, name) for name in mlakit.__all__]\n"
        f"loaded = [m for m in {slow!r} if m in sys.modules and m not in before]\n"
        "assert not loaded, loaded\n"
        "assert not torch.cuda.is_initialized()"
    )
    assert done.returncode == 0, done.stderr


def test_every_module_imports_without_the_optional_packages():
    """Each optional package is made impossible to import, as on a machine that lacks them all."""
    code = (
        "import sys, importlib\n"
        f"for m in {OPTIONAL!r}: sys.modules[m] = None\n"
        f"for name in {[m for m in MODULES if not needs_triton(m)]!r}:\n"
        "    importlib.import_module(name)\n"
    )
    done = run(code)
    assert done.returncode == 0, done.stderr[-2000:]


def needs_triton(module: str) -> bool:
    """Modules of @triton.jit kernels are the one exception: they are imported by a path's call."""
    return module.endswith("kernels") or module == "mlakit.timing.controls"


def test_measuring_needs_only_what_a_bare_gpu_machine_has():
    """torch, numpy, pandas and pyarrow; triton is there too, where a kernel is launched."""
    absent = [*OPTIONAL, "pydantic", "scipy", "typer", "rich", "yaml"]
    code = (
        "import sys\n"
        f"for m in {absent!r}: sys.modules[m] = None\n"
        "import mlakit.sweep.worker, mlakit.sweep.run, mlakit.timing.measure\n"
        "from mlakit.paths import registry\nregistry.all_paths()\n"
    )
    done = run(code)
    assert done.returncode == 0, done.stderr[-2000:]
