"""Who may import whom, how long a function may be, and what an import costs."""

import ast
import os
import re
import sys
from pathlib import Path

import pytest

from tests.process import python

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "fdora"

# layer -> layers of fdora that it may import, beside itself. Data flows down this list, nothing points up.
MAY = {
    "__main__": {"root", "_command"},
    "_command": {"_check"},
    "doctor": {"root", "_command", "_tuned", "functional", "integrations"},
    "tune": {"_check", "_command", "_tuned", "functional", "triton"},  # it times the kernels themselves
    "explain_model": {"_check", "_command", "predict", "functional"},
    "predict": {"_check", "rates"},
    "rates": set(),
    "root": {"_check", "_dispatch", "functional"},  # functional: see tests/test_command.py
    "integrations": {
        "root",
        "_check",
        "_command",
        "_dispatch",
        "_facts",
        "_norm_cache",
        "_plain",
        "_records",
        "_torch",
        "functional",
        "quant",
    },  # _facts: what a layer settles once, it keys as checks do
    "convert": {"_check", "_command", "functional"},
    "functional": {"_check", "_dispatch", "_recording", "_records", "_torch", "autograd", "predict", "quant"},
    "autograd": {"eager", "triton", "_recording", "_records", "_torch", "quant"},
    "eager": {"_records", "_torch", "quant"},
    "triton": {"_norm_cache", "_recording", "_records", "_torch", "_facts", "_plain", "_tuned", "_clock", "quant", "rates"},
    "quant": {"_check", "_recording", "_torch"},  # a value that all of them carry; it knows no vendor's package
    "jobs": {"jobs.causal"},
    "jobs.schedule": {"_check", "_command"},  # lengths in, microbatches out: it knows no tensor
    "jobs.plan": {
        "_check",
        "_command",
        "_recording",
        "_torch",
        "explain_model",
        "functional",
        "predict",
        "quant",
        "jobs.schedule",
    },  # shapes in, bytes and seconds out: it records calls of functional
    "jobs.loop": {
        "_check",
        "_torch",
        "jobs.schedule",
        "convert",
    },  # knows no layer: a model is a function; of convert it has how files are written
    "jobs.causal": {
        "_check",
        "_command",
        "functional",
        "integrations",
        "jobs.schedule",
        "jobs.plan",
        "jobs.loop",
        "predict",
    },  # where adapters in a model meet schedule, planner and loop
    **{moved: set() for moved in ("schedule", "plan", "train")},  # say in one sentence where they went
    "_check": {"_facts", "_torch"},
    "_clock": set(),
    "_tuned": {"_check"},
    "_dispatch": {"_check"},
    "_facts": {"_torch"},
    "_norm_cache": {"_torch"},
    "_plain": set(),
    "_recording": {"_torch"},  # of a call on tensors without data: whoever makes a plan or decodes asks
    "_records": set(),
    "_torch": set(),
}
# rooms of fdora/triton -> what of fdora.triton they may import; the facades, which have no room, may import all of it
ROOMS = {
    "tiles": ("tiles.", "runtime.device."),
    "kernels": ("kernels.", "runtime.private.", "runtime.cost.", "runtime.lookup."),
    "runtime": ("runtime.",),
}
# A private name of torch or of Triton, and everything of Triton that is not a public interface, stands in one file each.
PRIVATE = {
    "torch": {
        "_torch.py",
        "triton/runtime/private.py",  # what runs on a GPU: its streams, devices, allocator and cuBLAS
    },
    "triton": {"triton/runtime/private.py"},
}
PUBLIC_TRITON = ("triton.__version__", "triton.jit", "triton.language", "triton.tools.tensor_descriptor.TensorDescriptor")
FOREIGN = {
    # einops: a dependency of fdora; it names the axes that are split and merged
    "eager": {"torch", "einops"},
    "triton": {"torch", "triton"},
    # optree: a dependency of fdora; it takes apart what the functions of whole trees are given
    "functional": {"torch", "optree"},
    "quant": {"torch", "optree"},
    "convert": {"torch", "safetensors"},
    "_command": {"tqdm"},
    "_tuned": {"torch", "triton"},  # their versions
    "jobs.loop": {"torch", "optree", "safetensors"},
    "jobs.causal": {"torch", "peft", "transformers"},  # transformers: its command loads the model
    "jobs.plan": {"torch", "optree", "transformers"},  # whose decoders it records, without data
    # of the extra of that name, each imported inside the one function that wants it; no torch
    "jobs.schedule": {"numpy", "scipy", "matplotlib"},
    # transformers: a dependency of PEFT; by its activations a gated MLP is known. pydantic: of Axolotl, whose plugins declare their
    # options so
    "integrations": {
        *("torch", "packaging", "peft", "transformers", "torchao", "torchtune", "axolotl", "pydantic", "llamafactory", "swift"),
    },
}  # the rest may import torch and the standard library


def layer_of(parts):
    """from fdora import eager -> eager; from fdora.eager.norm import scale -> eager; the parts of jobs are layers of their own"""
    names = (".".join(parts[:count]) for count in (2, 1))
    return next((name for name in names if name in MAY), "root")


def imports(source):
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def faults(layer, source):
    for name in imports(source):
        head, *rest = name.split(".")
        if head == "fdora":
            target = layer_of(rest)
            if target != layer and target not in MAY[layer]:
                yield f"{layer} imports {name}"
        elif head not in sys.stdlib_module_names and head not in FOREIGN.get(layer, {"torch"}):
            yield f"{layer} imports {name}"


def of_rooms(room, source):
    for name in imports(source):
        head, _, rest = name.partition("fdora.triton.")
        if head == "" and room in ROOMS and not rest.startswith(ROOMS[room]):
            yield f"{room} imports {name}"


def names(source):
    """Every dotted name that begins with one that an import of torch or Triton brought in, in full."""
    tree = ast.parse(source)
    brought = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            brought |= {
                a.asname or a.name.partition(".")[0]: a.name if a.asname else a.name.partition(".")[0] for a in node.names
            }
        elif isinstance(node, ast.ImportFrom):
            brought |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    foreign = {short: full for short, full in brought.items() if full.split(".")[0] in PRIVATE}
    yield from (name for name in imports(source) if name.split(".")[0] in PRIVATE)
    for node in ast.walk(tree):
        parts = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if parts and isinstance(node, ast.Name) and node.id in foreign:
            yield ".".join([foreign[node.id], *reversed(parts)])


def private(file, source):
    for name in set(names(source)):
        package, *parts = name.split(".")
        hidden = any(part[0] == "_" and not part.endswith("__") for part in parts)
        if package == "triton":
            hidden = (name != "triton" and not name.startswith(PUBLIC_TRITON)) or name.startswith("triton.language.extra")
        if hidden and file not in PRIVATE[package]:
            yield f"{file} uses {name}"


JIT = ["triton.jit"], ["kernel"]


def no_kernels(source):
    """What a file of kernels holds beside its docstring, imports, constants of the compiler, tuples of operands and
    functions that Triton compiles."""
    for i, node in enumerate(ast.parse(source).body):
        if isinstance(node, (ast.Import, ast.ImportFrom)) or (i == 0 and isinstance(node, ast.Expr)):
            continue
        if isinstance(node, ast.FunctionDef) and [ast.unparse(d).partition("(")[0] for d in node.decorator_list] in JIT:
            continue
        if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith(("tl.constexpr(", "map(tl.constexpr, ")):
            continue
        if isinstance(node, ast.ClassDef) and [ast.unparse(b) for b in node.bases] == ["NamedTuple"]:
            continue
        yield ast.unparse(node).splitlines()[0]


def files():
    return sorted(PACKAGE.rglob("*.py"))


def test_no_arrow_points_up():
    found = []
    for file in files():
        layer = layer_of(file.relative_to(PACKAGE).with_suffix("").parts)
        assert layer != "root" or file == PACKAGE / "__init__.py", f"{file} is in no layer"
        found += [f"{file.name}: {fault}" for fault in faults(layer, file.read_text())]
    assert not found


@pytest.mark.parametrize(
    ("layer", "line"),
    [
        ("eager", "from fdora.autograd import norm"),
        ("eager", "from fdora import triton"),
        ("eager", "import fdora.functional.norm"),
        ("triton", "from fdora.eager.norm import scale"),
        ("functional", "from fdora.eager import norm"),
        ("autograd", "from fdora._check import FdoraError"),
        ("eager", "import triton"),
        ("_records", "from fdora._torch import PLAIN"),
        ("_torch", "from fdora import _records"),
        ("eager", "from fdora import _facts"),
        ("functional", "import transformers"),
        ("root", "from fdora.quant import cut"),
        ("functional", "from fdora.integrations.peft import use_fdora"),
        ("integrations", "from fdora.autograd.node import layers"),
        ("predict", "from fdora.functional import dora_norm"),
        ("doctor", "import packaging.version"),
        ("functional", "from fdora.convert import merge"),
        ("convert", "from fdora.eager.norm import blocks"),
        ("convert", "import numpy"),
        ("integrations", "from fdora.autograd.norm import row_norm"),
        ("quant", "from fdora.functional import dora_norm"),
        ("quant", "from fdora.eager.norm import blocks"),
        ("quant", "import bitsandbytes"),
        ("quant", "from torchao.quantization import Int8Tensor"),
        ("_check", "from fdora.quant import QuantWeight"),
        ("convert", "from fdora.quant import QuantWeight"),
        ("jobs.schedule", "import torch"),
        ("jobs.schedule", "from fdora.functional import dora_linear"),
        ("jobs.schedule", "from fdora.jobs import plan"),
        ("jobs.loop", "from fdora.triton import linear"),
        ("jobs.plan", "from fdora.schedule import simulate"),
        ("jobs.loop", "from fdora.jobs.causal import train"),
        ("functional", "from fdora.jobs.schedule import schedule"),
    ],
)
def test_the_walk_sees_red(layer, line):
    assert list(faults(layer, line))


def test_rooms_of_the_triton_backend():
    rooms = {room: list((PACKAGE / "triton" / room).glob("*.py")) for room in ROOMS}
    assert {p.name for p in (PACKAGE / "triton").iterdir() if (p / "__init__.py").exists()} == set(rooms)
    assert not [fault for room, found in rooms.items() for file in found for fault in of_rooms(room, file.read_text())]
    kernels = {file.name: list(no_kernels(file.read_text())) for file in rooms["kernels"]}
    assert len(kernels) > 10 and not any(kernels.values()), kernels


def test_private_names_have_one_home():
    found = {file.relative_to(PACKAGE).as_posix(): file.read_text() for file in files()}
    assert not [fault for file, source in found.items() for fault in private(file, source)]
    unused = {p: [f for f in homes if not list(private("elsewhere", found[f]))] for p, homes in PRIVATE.items()}
    assert unused == {"torch": [], "triton": []}


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch._C._cuda_getDevice()",
        "from torch._C import _cuda_getDevice",
        "from torch.autograd import forward_ad\nforward_ad._current_level",
        "import torch as t\nt.nn._reduction",
        "from torch import _dynamo",
        "import triton\ntriton.knobs.runtime.debug",
        "from triton.runtime import driver",
        "import triton.language as tl\ntl.extra.cuda.gdc_wait()",
        "import triton.backends",
    ],
)
def test_a_private_name_is_seen(source):
    assert list(private("eager/linear.py", source))


def untraced(source):
    """Methods of NamedTuples that Dynamo of torch 2.8 does not trace."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in ("_replace", "_make"):
            yield ast.unparse(node)


def test_what_is_traced_is_traced_by_torch_2_8():
    assert list(untraced("x = call._replace(specs=specs)"))
    assert not [
        fault
        for room in ("autograd", "eager")
        for file in (PACKAGE / room).glob("*.py")
        for fault in untraced(file.read_text())
    ]


@pytest.mark.parametrize("source", ["import torch\ntorch.__version__, torch.nn.Linear", "import triton.language as tl\ntl.dot"])
def test_a_public_name_is_not(source):
    assert not list(private("eager/linear.py", source))


@pytest.mark.parametrize(
    "line",
    [
        "def f(): pass",
        "BLOCK = 32",
        "A, B = map(int, '12')",
        "x: int = 3",
        "@triton.autotune\n@triton.jit\ndef f(): pass",
        "class Config: pass",
    ],
)
def test_what_is_no_kernel_is_seen(line):
    assert list(no_kernels(line))


@pytest.mark.parametrize(
    ("room", "line"),
    [
        ("kernels", "from fdora.triton.gemm import gemm"),
        ("kernels", "from fdora.triton.runtime.plan import Array"),
        ("runtime", "from fdora.triton.kernels.copy import copy_kernel"),
        ("runtime", "from fdora.triton.linear import linear"),
    ],
)
def test_a_room_left_is_seen(room, line):
    assert list(of_rooms(room, line))


# The rules of size and of arrows. Who breaks one today is named, and leaves the list when it is mended; nobody joins it.
LINES, PARAMETERS, SHORT = 60, 12, 40
LONG_FUNCTIONS = {  # by the name of its file, wherever that stands
    "norm_bwd.py:norm_bwd_finish_kernel",
    *("quant_strips.py:_strip4", "small_norm.py:small_norm_kernel"),
}
MANY_PARAMETERS = {  # public ones, whose options are keywords
    *("conv.py:dora_conv1d", "conv.py:dora_conv2d", "conv.py:dora_conv3d"),
    *("experts.py:dora_experts", "linear.py:dora_linear", "group.py:dora_mlp", "multi.py:dora_linear_multi"),
}
SHORT_FILES = {  # autograd/conv.py: a word has a file in every layer
    *("autograd/conv.py", "eager/tree.py"),
    "triton/kernels/sums.py",
}
# Arrows that no import shows, by what stands in the source of those who may not know of it.
HIDDEN = {
    "frameworks below integrations": (r"lora_variant|_active_adapter", set()),
    "callbacks into integrations": (r"\bgivers?\.", {"triton/norm_kept.py"}),
    "globals of another module, exchanged": (r"\b_(facts|plain)\.use\(", {"triton/runtime/walk.py"}),
}
# What integrations use of fdora.functional beside its public names.
INNER = {
    *("_tree.Part", "_tree.kept_norms", "_tree.no_norms", "_tree.tables"),
    *("norm.guarded_norm", "norm.kept_norms", "opaque.scale_slots"),
}


def functions(source):
    """Name, lines without the docstring, and parameters of every function."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first, a = node.body[0], node.args
            said = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
            lines = node.end_lineno - node.lineno + 1 - (first.end_lineno - first.lineno + 1 if said else 0)
            yield node.name, lines, len(a.posonlyargs + a.args + a.kwonlyargs)


def too_long(source):
    return {name for name, lines, _ in functions(source) if lines > LINES}


def too_wide(source):
    return {name for name, _, parameters in functions(source) if parameters > PARAMETERS}


def edges(sources):
    """Who imports whom among these modules, and which of these imports stand inside functions; not those for types alone."""

    def visit(node, inside):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            if isinstance(child, (ast.Import, ast.ImportFrom)):
                for name in imports(ast.unparse(child)):
                    while name and name not in sources:
                        name = name.rpartition(".")[0]
                    if name:
                        yield name, inside
            yield from visit(child, inside or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)))

    found = {module: set(visit(ast.parse(source), False)) for module, source in sources.items()}
    arrows = {module: {name for name, _ in its if name != module} for module, its in found.items()}
    return arrows, {(module, name) for module, its in found.items() for name, inside in its if inside}


def circles(arrows):
    """Modules from which one comes back to them."""

    def reached(start):
        seen, left = set(), [start]
        while left:
            new = arrows[left.pop()] - seen
            seen |= new
            left += new
        return seen

    return {module for module in arrows if module in reached(module)}


def modules():
    found = {}
    for file in files():
        parts = file.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def test_functions_are_short_and_take_little():
    long, wide = set(), set()
    for file in files():
        long |= {f"{file.name}:{f}" for f in too_long(file.read_text())}
        wide |= {f"{file.name}:{f}" for f in too_wide(file.read_text()) if file.parent.name != "kernels"}
    assert not long - LONG_FUNCTIONS and not wide - MANY_PARAMETERS


def test_files_are_no_crumbs_and_imports_no_circle():
    """A file that one other imports and that is short belongs into it. No import stands inside a function for order's sake."""
    found = modules()
    arrows, _ = edges({module: file.read_text() for module, file in found.items()})
    users = {module: sum(module in its for its in arrows.values()) for module in found}
    short = {
        file.relative_to(PACKAGE).as_posix()
        for module, file in found.items()
        if file.name != "__init__.py" and users[module] == 1 and len(file.read_text().splitlines()) < SHORT
    }
    assert not short - SHORT_FILES
    assert not circles(arrows)


def test_no_arrow_is_hidden():
    for what, (pattern, known) in HIDDEN.items():
        sources = [*files(), *PACKAGE.rglob("*.c")]
        names = {f: f.relative_to(PACKAGE).as_posix() for f in sources}
        found = {names[f] for f in sources if re.search(pattern, f.read_text()) and not names[f].startswith("integrations/")}
        assert not found - known, what
    inner = {name for file in (PACKAGE / "integrations").rglob("*.py") for name in imports(file.read_text())}
    inner = {name.removeprefix("fdora.functional.") for name in inner if name.startswith("fdora.functional.")}
    assert not {name for name in inner if "." in name and not name.startswith("prepared.")} - INNER


def test_the_rules_see_red():
    body = "\n".join(["    x = 1"] * LINES)
    assert too_long(f"def f():\n{body}") == {"f"} and not too_long(f"def f():\n    'said'\n{body[10:]}")
    names = [f"a{i}" for i in range(PARAMETERS)]
    assert too_wide(f"def f({', '.join(names)}, *, more): pass") == {"f"} and not too_wide(f"def f({', '.join(names)}): pass")
    sources = {"a": "import b", "b": "def f():\n    from a import x", "c": "import a", "d": "if TYPE_CHECKING:\n    import d"}
    arrows, inside = edges(sources)
    assert circles(arrows) == {"a", "b"} and inside == {("b", "a")}
    lines = ("x.lora_variant", "giver.norms", "    _facts.use(f)")
    assert all(re.search(pattern, line) for (pattern, _), line in zip(HIDDEN.values(), lines, strict=True))


def test_the_formatter_breaks_every_line():
    """What it is kept from is an expression that has grown too long, or a signature. Tables of numbers may lie as they are read."""
    assert not [f.name for f in files() if "# fmt: skip" in f.read_text()]


def run(code, **env):
    done = python("-c", code, **env)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


IMPORT = """
import sys, torch
names = lambda: [{n: id(v) for n, v in vars(m).items()} for m in (torch, torch.nn.functional)]
before, loaded, calls = names(), set(sys.modules), 0
def count(frame, event, arg):
    global calls
    calls += event == "call"
sys.setprofile(count)
import fdora
root = calls
import fdora.functional
sys.setprofile(None)
assert names() == before
new = {m for m in set(sys.modules) - loaded if m.partition(".")[0] not in ("fdora", *sys.stdlib_module_names)}
new -= {m for m in new if m.startswith("_sysconfigdata_")}  # of the standard library, under the name of its platform
print(root, calls, *sorted(new))
"""


def light(root, calls, new):
    """Of the Python calls of `import fdora`, of those and `import fdora.functional`, and of the foreign modules both load."""
    import torch

    if root >= 1_200:
        return False
    if torch.version.cuda or torch.version.hip or os.environ.get("TRITON_INTERPRET") == "1":
        # Triton is loaded where a GPU may come to be used
        theirs = {m.partition(".")[0] for m in new} <= {"triton", "torch", "optree", "einops"}
        return calls < 200_000 and theirs and not {"torch._dynamo", "torch._inductor", "torch.onnx"} & set(new)
    return calls < 20_000 and {m.partition(".")[0] for m in new} <= {"optree", "einops"}


def test_import_is_light_and_patches_nothing():
    """Counted in Python calls, not in seconds, which depend on what else the machine does. `import torch` takes 500,000."""
    root, calls, *new = run(IMPORT).split()
    assert light(int(root), int(calls), new), (root, calls, new)


@pytest.mark.parametrize("line", ["import hypothesis", "sum(map(lambda i: i, range(20_000)))"])
def test_a_heavy_import_would_be_seen(line):
    root, calls, *new = run(IMPORT.replace("import fdora\n", f"import fdora\n{line}\n")).split()
    assert not light(int(root), int(calls), new), (root, calls, new)


def test_each_bound_of_an_import_counts():
    """By itself: what is heavy in one way is often so in another."""
    assert light(500, 8_000, ["optree.ops"])
    for heavy in (
        (1_200, 8_000, []),
        (500, 200_000, []),
        (500, 8_000, ["optree", "packaging.version"]),
        (500, 8_000, ["torch._dynamo"]),
    ):
        assert not light(*heavy), heavy
