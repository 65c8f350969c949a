"""One process of tests/acceptance/fsdp.py: ``torchrun ... -m tests.acceptance.fsdp_worker FRAMEWORK stock|fdora FOUND ARGUMENT ...``.

The framework's own entry point with its own arguments. What it is asked about itself goes into FOUND: the loss of every backward, how
often each of fdora's paths ran, and how many all-gathers there were.

On a CPU one question of each framework is answered for it, for it would shard nothing there or end: what it is stands below. On GPUs
none is.
"""

import json
import os
import runpy
import sys
from collections import Counter
from contextlib import nullcontext, suppress
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor


def accelerate_shards():
    """accelerate looks at its FSDP plugin only where processes have accelerators, and trains under DDP elsewhere, without a word."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils.dataclasses import DistributedType

    init = AcceleratorState.__init__

    def opened(self, *args, fsdp_plugin=None, **more):
        init(self, *args, fsdp_plugin=fsdp_plugin, **more)
        if self.distributed_type == DistributedType.MULTI_CPU and fsdp_plugin is not None:
            self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            self.fsdp_plugin = fsdp_plugin
            self.device = PartialState._shared_state["device"] = torch.device("cpu")  # FSDP1 wants one without an index

    AcceleratorState.__init__ = opened
    for kind in (
        fsdp.FullStateDictConfig,
        fsdp.FullOptimStateDictConfig,
    ):  # FSDP1 on a CPU fails where they are to go to the CPU
        kind.__init__ = lambda self, *_, **__: self.__dict__.update(offload_to_cpu=False, rank0_only=False)


def trl(with_fdora):
    from trl.scripts.sft import main, make_parser

    from fdora.integrations.peft import enabled

    script, training, model, data = make_parser().parse_args_and_config(fail_with_unknown_args=False)
    with enabled() if with_fdora else nullcontext():
        main(script, training, model, data)


def llamafactory(with_fdora):
    if with_fdora:
        from fdora.integrations.llamafactory import main
    elif os.environ.get("USE_V1"):
        from llamafactory.v1.launcher import main
    else:
        from llamafactory.train.tuner import run_exp as main

        del sys.argv[1]
    main()


def llamafactory_v1(with_fdora):
    llamafactory(with_fdora)


def swift(with_fdora):
    from swift import sft_main

    sft_main(sys.argv[1:])


def axolotl(with_fdora):
    from axolotl.cli.train import do_cli

    do_cli(sys.argv[1])


def torchtune(with_fdora):
    import torchtune

    recipe = Path(torchtune.__file__).parents[1] / "recipes" / "lora_finetune_distributed.py"
    with suppress(SystemExit):
        runpy.run_path(str(recipe), run_name="__main__")  # as `tune run` does


def torchtune_model(**sizes):
    """A component for the config in the place of torchtune's builder: all that a user of fdora writes."""
    from torchtune.models.llama3 import lora_llama3

    from fdora.integrations.torchtune import use_fdora

    return use_fdora(lora_llama3(**sizes))


class TorchtuneTokenizer:
    """Bytes, as the other frameworks have them."""

    max_seq_len, pad_id = 64, 0

    def __init__(self, folder):
        from transformers import AutoTokenizer

        self.bytes = AutoTokenizer.from_pretrained(folder)

    def encode(self, text, add_bos=True, add_eos=True):
        return self.bytes(text)["input_ids"]


def no_accelerator_to_wait_for():
    """Its second version calls torch.accelerator.synchronize, which raises where there is none."""
    from llamafactory.v1.accelerator import helper

    helper.synchronize = lambda: None


def a_mesh_of_gpus_on_a_cpu():
    """It asks for a mesh of "cuda", whatever its processes run on."""
    from accelerate.parallelism_config import ParallelismConfig

    build = ParallelismConfig.build_device_mesh
    ParallelismConfig.build_device_mesh = lambda self, device: build(self, "cpu")
    os.environ["ACCELERATE_USE_CPU"] = "true"
    accelerate_shards()


def no_nccl_beside_gloo():
    """Its recipe asks for "cuda:nccl,cpu:gloo", of which a torch for the CPU has the second, and looks after a GPU's memory."""
    from torchtune import training

    training.get_memory_stats = training.log_memory_stats = training.cleanup_before_training = lambda *_, **__: None
    init = dist.init_process_group
    dist.init_process_group = lambda backend, *args, **more: init("gloo", *args, **more)


ON_A_CPU = {"axolotl": a_mesh_of_gpus_on_a_cpu, "llamafactory_v1": no_accelerator_to_wait_for, "torchtune": no_nccl_beside_gloo}


def watch(found, models, sizes, made_by, file):
    """Losses and models from now on, and the tensors that a trainer gathers for PEFT to write."""
    backward, init = torch.Tensor.backward, made_by.__init__

    def seen(self, *args, **more):
        found["losses"].append(self.detach().double().item())
        return backward(self, *args, **more)

    def made(self, *args, **more):
        init(self, *args, **more)
        models.append(self)
        sizes.append(sum(p.numel() for p in self.parameters()))

    torch.Tensor.backward, made_by.__init__ = seen, made
    save = getattr(made_by, "save_pretrained", None)

    def saved(self, *args, state_dict=None, **more):
        if state_dict:
            whole = {n: t.contiguous() for n, t in state_dict.items() if "lora_" in n}
            save_file(whole, f"{file}.{os.environ['RANK']}.safetensors")
        return save(self, *args, state_dict=state_dict, **more)

    if save:
        made_by.save_pretrained = saved


def held(model):
    """How many numbers of its parameters this process has, and what they lie in."""
    kinds = {"fsdp2": DTensor, "fsdp1": fsdp.FlatParameter}
    by = [name for name, kind in kinds.items() if any(isinstance(p, kind) for p in model.parameters())]
    return sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in model.parameters()), by


def paths(model, framework):
    """How often each ran, over all layers."""
    found = Counter()
    if framework == "torchtune":
        from fdora.integrations.torchtune import report

        for calls in report(model).values():
            found.update(calls)
    else:
        from fdora.integrations.peft import report

        for row in report(model):
            found.update({"fused": row.fused, "composed": row.composed, **row.fallbacks})
    return {path: n for path, n in found.items() if n}


def main(framework, who, file, *arguments):
    if framework == "torchtune":
        from torchtune.modules import TransformerDecoder as Model
    else:
        from peft import PeftModel as Model
    found, models, sizes = {"losses": []}, [], []
    watch(found, models, sizes, Model, file)
    sys.argv = [framework, *arguments]
    if not torch.cuda.is_available():
        ON_A_CPU.get(framework, accelerate_shards)()
    globals()[framework](who == "fdora")
    numbers, by = held(models[-1])
    found |= {"held": numbers, "of": sizes[-1], "by": by, "paths": paths(models[-1], framework)}
    Path(f"{file}.{os.environ['RANK']}").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # Python aborts at its end, before 3.14, if one of gloo's threads then lets go of a tensor
