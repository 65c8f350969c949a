"""Each framework's own commands, with and without fdora: ``python -m tests.acceptance.frameworks --work .venv-frameworks``.

Makes one environment for each framework, with a torch for the CPU and the versions below, and runs tests/integrations/test_NAME.py
in it. Heavy frameworks come without the dependencies that these tests do not touch or that fight a CPU: see RECIPES. About ten
minutes and 12 GB for all; an environment, once made, is used again. ``python -m tests.acceptance.frameworks axolotl`` runs one.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TORCH = "torch==2.13.0"

# framework -> (what pip may resolve, what comes without its dependencies)
RECIPES = {
    "trl": (["trl==1.16.0", "peft==0.21.2", "transformers==5.23.0"], []),
    "axolotl": (
        [
            *(
                "peft==0.20.0",
                "transformers==5.16.1",
                "trl==1.9.0",
                "datasets==4.8.4",
                "accelerate==1.13.0",
                "huggingface_hub==1.17.0",
            ),
            *(
                "pydantic==2.12.5",
                "bitsandbytes==0.50.2",
                "posthog==6.7.11",
                "python-dotenv==1.0.1",
                "addict",
                "art",
                "colorama",
            ),
            *(
                "einops",
                "evaluate",
                "fastcore",
                "fire",
                "numba",
                "pillow",
                "requests",
                "scipy",
                "sentencepiece",
                "triton",
                "typer",
                "wandb",
            ),
        ],
        # its pins for quantisation, cloud storage and evaluation are left out
        ["axolotl==0.19.0", "axolotl-contribs-lgpl==0.0.7", "axolotl-contribs-mit==0.0.6", "torchao==0.17.0"],
    ),
    "swift": (["ms-swift==4.6.0"], []),
    "llamafactory": (
        [
            *(
                "peft==0.18.1",
                "transformers<=5.6.0",
                "trl<=0.24.0",
                "datasets<=4.0.0",
                "accelerate<=1.11.0",
                "tyro<0.9",
                "av",
                "einops",
            ),
            *(
                "fastapi",
                "fire",
                "hf-transfer",
                "matplotlib",
                "modelscope",
                "omegaconf",
                "pandas",
                "protobuf",
                "pydantic",
                "pyyaml",
            ),
            *("scipy", "sentencepiece", "sse-starlette", "tiktoken", "uvicorn"),
        ],
        ["llamafactory==0.9.5", "torchdata==0.11.0"],
    ),
    "unsloth": (
        [
            *(
                "peft>=0.18",
                "transformers<=5.17.0",
                "trl<=1.15.0",
                "datasets<5",
                "accelerate",
                "bitsandbytes",
                "diffusers",
                "einops",
            ),
            *(
                "hf_transfer",
                "json5",
                "msgspec",
                "nest-asyncio",
                "pillow",
                "protobuf",
                "psutil",
                "regex",
                "sentencepiece",
                "structlog",
            ),
            *("torchao", "triton", "typer", "tyro", "wheel"),
        ],
        ["unsloth==2026.10.9", "unsloth_zoo==2026.10.9", "cut_cross_entropy"],  # not: xformers, torchvision
    ),
}
# LLaMA-Factory imports torchaudio on the way to its templates, for audio alone; PyPI's wheel does not load beside a torch for the CPU.
STUBS = {"llamafactory": ["torchaudio"]}


def environment(name, work):
    """The interpreter of a virtual environment with this framework."""
    folder = work / name
    python, done = folder / "bin" / "python", folder / "made"
    if not done.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        pins = folder / "constraints.txt"
        pins.write_text(TORCH + "\n")
        pip = [python, "-m", "pip", "install", "--quiet", "--constraint", pins]
        wanted, alone = RECIPES[name]
        subprocess.run([*pip, TORCH, "numpy", "pytest", "einops>=0.8", "optree>=0.14"], check=True)
        subprocess.run([*pip, *wanted], check=True)
        if alone:
            subprocess.run([*pip, "--no-deps", *alone], check=True)
        (packages,) = (folder / "lib").glob("python3.*/site-packages")
        for stub in STUBS.get(name, ()):
            (packages / f"{stub}.py").write_text('"""Stands for a package that does not load on the CPU."""\n')
        done.touch()
    return python


def chosen(doc, known):
    """What a command line names of these, all by default; and the folder of the environments."""
    parser = argparse.ArgumentParser(description=doc.partition("\n")[0])
    parser.add_argument("names", nargs="*", help=f"of {', '.join(known)}; all by default")
    parser.add_argument("--work", type=Path, default=Path(".venv-frameworks"), help="where the environments are, or are made")
    options = parser.parse_args()
    unknown = set(options.names) - known.keys()
    if unknown:
        parser.error(f"no {', '.join(sorted(unknown))} here")
    return options.names or list(known), options.work.absolute()


def main():
    failed = []
    names, work = chosen(__doc__, RECIPES)
    for name in names:
        python = environment(name, work)
        env = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        print(f"== {name}: {', '.join(RECIPES[name][1] or RECIPES[name][0])}", flush=True)
        command = [
            python,
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            "-W",
            "ignore",
            "-rs",
            f"tests/integrations/test_{name}.py",
        ]
        done = subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        said = done.stdout.strip()
        print(said if done.returncode else said.splitlines()[-1], flush=True)
        if done.returncode or "skipped" in said:
            failed.append(name)
    if failed:
        raise SystemExit(f"Failed or skipped: {', '.join(failed)}.")


if __name__ == "__main__":
    main()
