"""Who runs, and why: the argument, the context, the environment variable, then the rule."""

import importlib.util
import warnings

import pytest
import torch

import fdora
from fdora import FdoraError
from fdora._dispatch import choose
from fdora.autograd import _ops
from fdora.functional import dora_linear, dora_norm, select_backend
from tests import device
from tests.make import tensors
from tests.process import python

BOTH = ("eager", "triton")
module = importlib.import_module("fdora.functional.backend")


def test_the_ladder():
    def rule(device, dtype, requested="auto", forced="auto", available=BOTH, obstacle=""):
        return choose(device, dtype, requested, forced, available, obstacle)

    assert rule("cuda", torch.bfloat16).name == "triton"
    assert rule("cpu", torch.bfloat16).name == "eager"
    assert rule("cuda", torch.float64).name == "eager"
    assert rule("cuda", torch.bfloat16, available=("eager",)).name == "eager"
    assert rule("cuda", torch.bfloat16, obstacle="too old") == ("eager", "too old")
    assert rule("cuda", torch.float64, obstacle="too old").reason == "torch.float64 has no Triton kernel"
    assert "tensors are on cpu" in rule("cpu", torch.float32, obstacle="too old").reason
    assert rule("cuda", torch.float32, "triton") == ("triton", "asked for by the backend= argument")
    assert rule("cuda", torch.float32, "triton", obstacle="too old").name == "triton"  # whoever asks may try
    assert rule("cuda", torch.float32, "triton", forced="eager").name == "triton"
    assert rule("cuda", torch.float32, forced="eager") == ("eager", "asked for by fdora.backend or FDORA_BACKEND")


def test_public_call():
    x = torch.randn(2)
    assert select_backend(x).name == "eager" and select_backend(x).reason
    assert select_backend("cpu", torch.float32) == select_backend(x)


def test_who_asks_for_kernels_hears_why_there_are_none(monkeypatch):
    monkeypatch.setattr(module, "NO_KERNELS", "Triton is not installed")
    with pytest.raises(FdoraError, match="Triton is not installed"):
        select_backend("cpu", torch.float32, backend="triton")


def test_context_nests_and_restores():
    with fdora.backend("eager"):
        assert select_backend("cuda", torch.float32).reason == "asked for by fdora.backend or FDORA_BACKEND"
        with fdora.backend("auto"):
            assert "asked" not in select_backend("cuda", torch.float32).reason
        with pytest.raises(ZeroDivisionError), fdora.backend("auto"):
            1 / 0
        assert "asked" in select_backend("cuda", torch.float32).reason
    assert "asked" not in select_backend("cuda", torch.float32).reason


@pytest.mark.parametrize(("name", "wish"), [("eager", "eager"), ("auto", "auto"), ("", "auto")])
def test_environment(name, wish, monkeypatch):
    """It is read once, at import. An empty variable is no wish."""
    monkeypatch.setenv("FDORA_BACKEND", name)
    spec = importlib.util.find_spec("fdora._dispatch")
    anew = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(anew)
    assert anew.forced() == wish


def test_the_interpreter_is_refused_bfloat16():
    """It would multiply wrongly."""
    pytest.importorskip("triton", reason="needs Triton; `make test` installs it")
    code = (
        "import torch; from fdora import FdoraError; import fdora.functional as F\n"
        "t = {k: torch.ones(*s).bfloat16() for k, s in dict(x=(2, 16), W=(16, 16), A=(4, 16), B=(16, 4), m=(16,)).items()}\n"
        "for call in (lambda **how: F.dora_linear(**t, **how), lambda **how: F.dora_compose(t['W'], t['W'], t['m'].float(), **how)):\n"
        "    try:\n"
        "        call(s=1.0, backend='triton')\n"
        "    except FdoraError as error:\n"
        "        print(error)\n"
    )
    run = python("-c", code, TRITON_INTERPRET="1")
    assert run.stdout.count("must be eager for torch.bfloat16 tensors") == 2, run.stdout + run.stderr


def test_compiled_code_follows_the_context():
    """The name is a guarded global: a function compiled under one backend is compiled again for the other."""
    seen = []

    def spy(graph, inputs):
        seen.append(graph)
        return graph.forward

    W, A, B = torch.randn(4, 3), torch.randn(2, 3), torch.randn(4, 2)
    f = torch.compile(lambda W: dora_norm(W, A, B, s=1.0), backend=spy, fullgraph=True)
    f(W)
    with fdora.backend("eager"):
        f(W)
    assert len(seen) == 2


@pytest.fixture
def like_a_gpu(monkeypatch):
    """Tensors of this machine count as tensors on a GPU; yields what tells select_backend why kernels cannot run there."""

    def forget():
        module._remembered.cache_clear()
        module._warned.clear()

    forget()
    real = module.choose
    monkeypatch.setattr(module, "choose", lambda device, dtype, *rest: real("cuda", dtype, *rest[:-1], module.obstacle(None)))
    monkeypatch.setattr(module, "NO_KERNELS", "")
    monkeypatch.setattr(module, "obstacle", lambda device: "Tesla T4 has compute capability 7.5")
    monkeypatch.setattr(module, "QUIET", ())
    yield lambda reason: (monkeypatch.setattr(module, "obstacle", lambda device: reason), module._remembered.cache_clear())
    forget()


def heard(call):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [w for w in caught if "fdora" in str(w.message)]


def layer(dtype=torch.float32, call=dora_linear, **extra):
    t = tensors(dtype=dtype)
    return call(t["x"], *(t[n] for n in "WABm"), s=0.7, **extra)


def test_one_warning_where_kernels_cannot_run(like_a_gpu):
    assert not heard(lambda: layer(torch.float64)) and not heard(lambda: layer(backend="eager"))
    first = heard(layer)
    assert [w.category for w in first] == [RuntimeWarning] and first[0].filename == __file__
    assert "the eager backend runs, not the kernels: Tesla T4 has compute capability 7.5." in str(first[0].message)
    assert select_backend(torch.ones(1)) == ("eager", "Tesla T4 has compute capability 7.5")
    W, A, B = torch.eye(3), torch.ones(1, 3), torch.ones(3, 1)
    for call in (layer, lambda: layer(torch.bfloat16), lambda: dora_norm(W, A, B, s=1.0)):
        assert not heard(call)
    like_a_gpu("Triton is not installed")
    assert len(heard(layer)) == 1 and not heard(layer)


def test_one_warning_under_compile_too(like_a_gpu):
    torch._dynamo.reset()
    call = torch.compile(lambda *args, s: dora_linear(*args, s=s), fullgraph=True, backend="eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert len(heard(lambda: layer(call=call))) == 1
        assert not heard(lambda: layer(call=call)) and not heard(layer)


def test_no_warning_on_a_cpu_or_for_a_question():
    module._remembered.cache_clear()
    module._warned.clear()
    cpu = torch.ones(1)
    assert not heard(lambda: select_backend(cpu)) and not heard(lambda: select_backend(cpu.to("meta")))
    for name in ("cpu", "cuda", "cuda:0", "xpu"):
        assert not heard(lambda: select_backend(name, torch.float32))


def test_obstacles(monkeypatch):
    monkeypatch.setattr(_ops, "NO_KERNELS", "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    for capability, hip, want in (
        ((7, 5), None, "Tesla T4 has compute capability 7.5, Triton kernels need 8.0"),
        ((8, 0), None, ""),
        ((12, 1), None, ""),
        ((7, 5), "6.4", ""),
    ):
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        assert _ops.obstacle(torch.device("cuda:0")) == want
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert _ops.obstacle(torch.device("cuda")) == "this machine has no GPU"


# what a package named triton holds (None: there is none), and what is said of it
BROKEN = {
    "raise ImportError('libcuda.so.1: cannot open')": "Triton cannot be used (ImportError: libcuda.so.1: cannot open)",
    "raise OSError": "Triton cannot be used (OSError)",
    "": "Triton cannot be used (AttributeError: ",
    "__version__ = '3.3.1'": "Triton cannot be used (ImportError: version 3.3.1 is too old, fdora needs 3.4)",
    "__version__ = '3.9.0'": "Triton cannot be used (",
    None: "Triton is not installed",
}
EACH = """
import os, sys
import torch
assert "triton" not in sys.modules
torch.version.cuda = "13.0"  # as a torch for GPUs
for folder in sys.argv[1:]:
    if os.fork():  # of torch, which takes seconds to import
        os.wait()
        continue
    if os.path.exists(folder):
        sys.path.insert(0, folder)
    else:
        sys.modules["triton"] = None
    import fdora.functional as F

    W, A, B = torch.eye(3), torch.ones(1, 3), torch.ones(3, 1)
    print(F.dora_linear(torch.ones(3), W, A, B, torch.ones(3), s=1.0).shape, F.select_backend("cuda", torch.float32), flush=True)
    os._exit(0)
"""


def test_no_crash_at_import_of_a_broken_triton(tmp_path):
    for i, code in enumerate(BROKEN):
        if code is not None:
            (tmp_path / f"{i}/triton").mkdir(parents=True)
            (tmp_path / f"{i}/triton/__init__.py").write_text(code)
    folders = [tmp_path / str(i) for i in range(len(BROKEN))]
    run = python("-W", "error::RuntimeWarning", "-c", EACH, *folders, TRITON_INTERPRET=None, FDORA_BACKEND=None)
    assert run.returncode == 0 and run.stdout.count("\n") == len(BROKEN), run.stdout + run.stderr
    for said, reason in zip(run.stdout.splitlines(), BROKEN.values(), strict=True):
        assert "torch.Size([3])" in said and reason in said and "name='eager'" in said, said


REMOVE = """
import importlib, sys
for place in sys.argv[1:]:
    package, file, name = place.split(".")
    module = importlib.import_module(f"fdora.{package}.{file}")
    op = vars(module).pop(name)
    try:
        importlib.import_module("fdora.autograd._ops")
        print(f"{place}: nobody missed it")
    except AttributeError as error:
        if f"no attribute '{name}'" not in str(error):
            print(f"{place}: {error}")
    setattr(module, name, op)
    sys.modules.pop("fdora.autograd._ops", None)
importlib.import_module("fdora.autograd._ops")  # with all of them there it can be imported
"""


def listed():
    """Each op that a backend names, and what implements it: folder and file."""
    for package, own in (("eager", _ops.OF_EAGER), ("triton", _ops.OF_TRITON)):
        for files in (_ops.BOTH, own):
            yield from ((op, package, file) for file, ops in files.items() for op in ops.split())


def test_a_kernel_that_is_missing_is_missed_at_import():
    """Without a list eager would answer for it, and every test of kernels would stay green."""
    pytest.importorskip("triton", reason="needs Triton; `make test` installs it")
    places = sorted({f"{package}.{file}.{op}" for op, package, file in listed()})
    run = python("-c", REMOVE, *places, TRITON_INTERPRET="1")
    assert run.returncode == 0 and not run.stdout and len(places) > 20, run.stdout + run.stderr


@pytest.mark.skipif("device.NAME == 'cpu'", reason="needs a GPU; runs with --device cuda on a machine with one")
def test_a_gpu_with_kernels_is_silent():
    module._remembered.cache_clear()
    assert not heard(layer) and select_backend(torch.ones(1, device=device.NAME)).name == "triton"
