"""What is installed here, what runs and why, and whether it computes the right thing. Put its output into a bug report.

Exit status: 0; 1 if it found a problem.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
import warnings
from importlib.metadata import PackageNotFoundError, entry_points, version
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

from fdora import FdoraError, __version__, _tuned
from fdora._command import mistakes, parser_of
from fdora.functional import dora_linear, dora_norm, select_backend

# distribution -> the oldest version that works, the newest that was run (as a prefix); None: no bound is known
FRAMEWORKS: dict[str, tuple[str | None, str | None]] = {
    "peft": ("0.18", "0.21"),
    "trl": (None, "1.16"),
    "transformers": (None, "5"),
    "bitsandbytes": ("0.46", "0.50"),
    "torchtune": ("0.6.1", "0.6.1"),
    "axolotl": ("0.18", "0.19"),
    "ms-swift": ("4.6", "4.6"),
    "llamafactory": ("0.9.5", "0.9.5"),
    "unsloth": ("2026.10.9", "2026.10.9"),
}
TORCH, TRITON = ("2.8", "2.13"), ("3.4", None)
SETTINGS = ("FDORA_BACKEND", "FDORA_TILES", "TRITON_INTERPRET", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CC")
DTYPES = (torch.float32, torch.bfloat16)
TOKENS = (4, 96)  # few tokens and many take different kernels


class Line(NamedTuple):
    """``fault``: what keeps fdora from working as it should on this machine; empty where nothing does."""

    name: str
    text: str
    fault: str = ""


def main(argv: list[str] | None = None) -> int:
    """Print what was found, section by section, then one line that starts with OK or with PROBLEM.

    Returns:
      The exit status: 0 for OK, 1 for a problem: a self-check that fails or does not run, a GPU without kernels, a torch that
      is too old. A framework whose version was not tested is no problem of this machine; its line says so.
    """
    parser = parser_of("doctor", __doc__)
    parser.parse_args(argv)
    with mistakes(parser):
        faults = []
        for title, section in {
            "installed": installed,
            "backend": backends,
            "frameworks": frameworks,
            "self-check": checks,
        }.items():
            print(title)
            for line in section():
                print(f"  {line.name:<16} {line.text}", flush=True)
                if line.fault:
                    faults.append(line.fault)
        if faults:
            print(f"PROBLEM: {'; '.join(dict.fromkeys(faults))}.")
            return 1
        where = ", ".join(f"{d} ({select_backend(d, DTYPES[-1]).name})" for d in devices())
        alone = "" if len(devices()) > 1 else " There is no GPU, so no kernel was checked."
        print(f"OK: fdora computes the right thing on {where}.{alone}")
    return 0


def installed() -> list[Line]:
    cpus = os.cpu_count()
    built = next((f"{name} {v}" for name in ("cuda", "hip", "xpu") if (v := getattr(torch.version, name, None))), "CPU only")
    old = span(torch.__version__, *TORCH) == "too old"
    lines = [
        Line("machine", f"{platform.platform()}, {platform.machine()}, {cpus} CPU{'s' if cpus != 1 else ''}"),
        Line("Python", f"{platform.python_version()} ({sys.executable})"),
        Line("fdora", __version__),
        Line(
            "torch",
            f"{torch.__version__}, built for {built}: {span(torch.__version__, *TORCH)}",
            f"torch {torch.__version__} is older than {TORCH[0]}: install a newer one" if old else "",
        ),
        Line("Triton", triton()),
        Line("C compiler", compiler() or "none: Triton needs one to launch a kernel (install gcc, or set CC)"),
    ]
    gpus = [d for d in devices() if d.type != "cpu"]
    lines += [Line(str(d), gpu(d)) for d in gpus] or [Line("GPU", "none that torch can use")]
    lines += [tiles(d) for d in gpus if d.type == "cuda" and not torch.version.hip]
    return lines + [Line(name, f"{os.environ[name]!r} in the environment") for name in SETTINGS if name in os.environ]


def backends() -> list[Line]:
    """What runs for bfloat16 tensors on each device. Eager is the normal backend of a CPU and a problem on a GPU."""
    lines = []
    for device in devices():
        try:
            choice = select_backend(device, torch.bfloat16)
        except FdoraError as error:
            lines.append(Line(str(device), str(error), "the backend that was asked for cannot run"))
            continue
        slow = device.type != "cpu" and choice.name != "triton"
        fault = f"no kernels on {device}, because {choice.reason}" if slow else ""
        lines.append(Line(str(device), f"{choice.name}, because {choice.reason}", fault))
    return lines


def frameworks() -> list[Line]:
    return [*(Line(name, found(name, *bounds)) for name, bounds in FRAMEWORKS.items()), Line("vLLM", serving())]


def serving() -> str:
    """Whether the vLLM that is here would serve DoRA adapters. Imports it."""
    if find_spec("vllm") is None:
        return "not installed"
    group, allowed = "vllm.general_plugins", os.environ.get("VLLM_PLUGINS")
    if not any(each.name == "fdora" for each in entry_points(group=group)):
        return f"does not serve DoRA: fdora is no installed package here that {group} names (pip install path/to/fdora)"
    if allowed is not None and "fdora" not in allowed.split(","):
        return f"does not serve DoRA: VLLM_PLUGINS={allowed!r} leaves fdora out"
    try:
        from fdora.integrations.vllm import obstacle

        wrong = obstacle()
    except Exception as error:  # whatever an import of it raises is a finding
        wrong = f"{type(error).__name__}: {error}".partition("\n")[0]
    return f"does not serve DoRA: {wrong}" if wrong else "serves DoRA adapters (docs/serving.md)"


def checks() -> list[Line]:
    """Forward and backward against float64, on each device, in float32 and bfloat16, for few tokens and many."""
    lines = []
    for device in devices():
        for dtype in DTYPES:
            name = f"{device} {str(dtype).removeprefix('torch.')}"
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", RuntimeWarning)  # the section above says which backend runs
                    results = [check(device, dtype, tokens) for tokens in TOKENS]
            except Exception as error:  # whatever a compiler or a driver raises is a finding
                text = f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"
                hint = "" if device.type == "cpu" or compiler() else " (no C compiler was found)"
                lines.append(Line(name, f"does not run: {text}", f"the self-check does not run on {device}{hint}"))
                continue
            worst = {n: max((r[n] for r in results), key=badness) for n in results[0]}
            wrong = [n for n, pair in worst.items() if badness(pair) > 1]
            text = ", ".join(f"{n} {error:.1e}{f' > {limit:.1e}' if n in wrong else ''}" for n, (error, limit) in worst.items())
            lines.append(Line(name, text, f"{', '.join(wrong)} is wrong on {name}" if wrong else ""))
    return lines


def badness(pair: tuple[float, float]) -> float:
    """The error in units of its limit; NaN is worse than all."""
    error, limit = pair
    return error / limit if error == error else float("inf")


def devices() -> list[torch.device]:
    """The CPU and every GPU that torch can use, CUDA's and HIP's by the name "cuda"."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    count = torch.accelerator.device_count() if accelerator else 0
    return [torch.device("cpu"), *(torch.device(accelerator.type, i) for i in range(count) if accelerator)]


def gpu(device: torch.device) -> str:
    if device.type != "cuda":
        return f"an accelerator of type {device.type}"
    facts = torch.cuda.get_device_properties(device)
    kind = facts.gcnArchName if torch.version.hip else f"compute capability {facts.major}.{facts.minor}"
    return f"{facts.name}, {kind}, {facts.total_memory / 2**30:.0f} GiB"


def tiles(device: torch.device) -> Line:
    """Whether `fdora tune` was run for this GPU."""
    try:
        return Line("tiles", _tuned.state(_tuned.key_at(device)))
    except FdoraError as error:
        return Line("tiles", str(error), "the file of fdora tune is broken")


def compiler() -> str | None:
    """Where Triton looks for a C compiler: CC, gcc, clang."""
    return os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")


def triton() -> str:
    """The packages that hold it for one kind of chip have names of their own."""
    for name in ("triton", "pytorch-triton-rocm", "pytorch-triton-xpu", "pytorch-triton", "triton-windows"):
        text = found(name, *TRITON)
        if text != "not installed":
            return text if name == "triton" else f"{name} {text}"
    return "not installed"


def found(package: str, oldest: str | None, newest: str | None) -> str:
    """``0.21.2: supported``"""
    try:
        have = version(package)
    except PackageNotFoundError:
        return "not installed"
    bounds = f"{oldest} to {newest}" if oldest and newest else f"{oldest} or newer" if oldest else f"up to {newest}"
    return f"{have}: {span(have, oldest, newest)} ({newest if oldest == newest else bounds})"


def span(have: str, oldest: str | None, newest: str | None) -> str:
    """ "supported", "too old", or "newer than what was tested". A bound speaks of the parts that it has: 0.21 holds 0.21.2."""
    parts = numbers(have)
    if oldest and parts < numbers(oldest):
        return "too old"
    if newest and parts[: len(numbers(newest))] > numbers(newest):
        return "newer than what was tested"
    return "supported"


def numbers(text: str) -> tuple[int, ...]:
    """(2, 13, 0) of 2.13.0+cpu, (0, 22, 0) of 0.22.0.dev0."""
    release = re.match(r"[\d.]*", text.partition("+")[0].partition(".dev")[0])
    return tuple(int(n) for n in re.findall(r"\d+", release.group() if release else ""))


M, K, N, R, S = 96, 160, 224, 8, 2.0
EPS_NORM = 16 * torch.finfo(torch.float32).eps  # a norm is one float32 sum of K squares, whatever the dtype of W


def check(device: torch.device | str, dtype: torch.dtype, tokens: int = M) -> dict[str, tuple[float, float]]:
    """One forward and backward of the layer against the formula in float64:
    ``{"c": (error, limit), "y": ..., "dx": ..., "dA": ..., "dB": ..., "dm": ...}``: relative errors, ``||got - truth|| /
    ||truth||`` with the truth in float64 on the CPU.

    The limit of y and of the gradients is twice what the formula loses when plain torch computes it in the same dtype on the
    same device, plus one rounding; that of ``c = dora_norm(...)`` is a few roundings of float32. Products run at torch's
    highest float32 precision. Torch's random state is left alone.
    """
    device = torch.device(device)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        shapes = {"x": (tokens, K), "A": (R, K), "B": (N, R), "W": (N, K), "dy": (tokens, N)}
        given = {n: torch.randn(*shape, dtype=torch.float64) for n, shape in shapes.items()}
        spread = 1 + 0.05 * torch.randn(N, dtype=torch.float64)
    for name, scale in {"A": K**-0.5, "B": 0.1 * R**-0.5, "W": K**-0.5}.items():
        given[name] *= scale
    given["m"] = spread * _norm(given["W"], given["A"], given["B"])
    given = {n: t.to(dtype) for n, t in given.items()}
    here = {n: t.to(device) for n, t in given.items()}
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        c = dora_norm(here["W"], here["A"], here["B"], s=S)
        got = {"c": c} | _gradients(here, lambda x, W, A, B, m: dora_linear(x, W, A, B, m, s=S, norm=c))
        plain = _gradients(here, _formula)
    finally:
        torch.set_float32_matmul_precision(precision)
    exact = {n: t.double() for n, t in given.items()}
    truth = {"c": _norm(exact["W"], exact["A"], exact["B"])} | _gradients(exact, _formula)
    limits = {n: 2 * _error(t, truth[n]) + torch.finfo(dtype).eps for n, t in plain.items()}
    return {n: (_error(t, truth[n]), limits.get(n, EPS_NORM)) for n, t in got.items()}


def _norm(W: Tensor, A: Tensor, B: Tensor) -> Tensor:
    return torch.linalg.vector_norm(W + S * (B @ A), dim=1)


def _formula(x: Tensor, W: Tensor, A: Tensor, B: Tensor, m: Tensor) -> Tensor:
    return (m / _norm(W, A, B).detach()) * (x @ W.T + S * (x @ A.T) @ B.T)


def _gradients(t: dict[str, Tensor], layer) -> dict[str, Tensor]:
    leaves = {n: t[n].detach().clone().requires_grad_() for n in ("x", "A", "B", "m")}
    y = layer(leaves["x"], t["W"], leaves["A"], leaves["B"], leaves["m"])
    grads = torch.autograd.grad(y, list(leaves.values()), t["dy"])
    return {"y": y.detach()} | {f"d{n}": d for n, d in zip(leaves, grads, strict=True)}


def _error(got: Tensor, truth: Tensor) -> float:
    return (torch.linalg.vector_norm(got.cpu().double() - truth) / torch.linalg.vector_norm(truth)).item()
