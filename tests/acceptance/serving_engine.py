"""One engine of serving.py: ``python -m tests.acceptance.serving_engine engine|stock|http MODEL-DTYPE WORK``. Imports vLLM late.

Requests are judged where PEFT's own model is: in float64 on the tokens that the engine chose. An error of a logprob may be twice
that of PEFT in the dtype of the engine, and a rounding of a logit; where the two best tokens are further apart than that, the engine took
the best. Base requests go in batches of their own: vLLM 0.32 on a CPU gives them the last slot beside adapters.
"""

import contextlib
import gc
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model

VOCABULARY, LONGEST, CHOSEN = 320, 24, 12
ATTENTION, MLP = ["q_proj", "k_proj", "v_proj", "o_proj"], ["gate_proj", "up_proj", "down_proj"]
ADAPTERS = {
    "law": {"r": 8, "target_modules": ATTENTION + MLP, "use_dora": True},
    "med": {"r": 4, "target_modules": ["q_proj", "v_proj"], "use_dora": True},
    "rs": {"r": 8, "target_modules": ATTENTION, "use_dora": True, "use_rslora": True},
    "patterns": {
        **{"r": 4, "target_modules": ["q_proj", "up_proj", "down_proj"], "use_dora": True},
        **{"rank_pattern": {"up_proj": 7}, "alpha_pattern": {"down_proj": 3}},
    },
    "mlp": {"r": 8, "target_modules": MLP, "use_dora": True},
    "one": {"r": 1, "target_modules": ["o_proj"], "use_dora": True},
    "layer": {"r": 4, "target_modules": ATTENTION, "use_dora": True, "layers_to_transform": [1]},
    "lora": {"r": 8, "target_modules": ATTENTION + MLP},
    "small": {"r": 2, "target_modules": ["v_proj", "gate_proj"]},
}
SLOTS = 4
CLIENT = """
import sys, urllib.request as u
answer = u.urlopen(u.Request(sys.argv[1], sys.argv[2].encode(), {"Content-Type": "application/json"}))
print(answer.readline(), flush=True)
answer.read()
"""


def config_of(name):
    import transformers

    sizes = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 256}
    sizes |= {"initializer_range": 0.15, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    kind = {"llama": "Llama", "qwen3": "Qwen3", "gemma3": "Gemma3Text"}[name]
    more = {"llama": {"attention_bias": True}, "qwen3": {}, "gemma3": {"sliding_window": 16}}[name]
    return getattr(transformers, f"{kind}Config")(**sizes, **more)


def made(name, work):
    """The folder of a random model, and of adapters that were trained on random tokens for some steps."""
    from transformers import AutoModelForCausalLM

    folder = work / name
    if (folder / "done").exists():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(name))
    for key, p in model.named_parameters():
        if key.endswith("bias"):
            torch.nn.init.normal_(p, std=1.0)
    model.save_pretrained(folder / "model")
    tokenizer(folder / "model")
    for adapter, options in ADAPTERS.items():
        base = AutoModelForCausalLM.from_pretrained(folder / "model")
        peft = get_peft_model(base, LoraConfig(**{"lora_alpha": 16} | options))
        step = torch.optim.AdamW([p for p in peft.parameters() if p.requires_grad], lr=1e-2)
        for _ in range(8):
            tokens = torch.randint(3, VOCABULARY, (4, LONGEST))
            peft(input_ids=tokens, labels=tokens).loss.backward()
            step.step()
            step.zero_grad()
        with torch.no_grad():  # g away from 1
            for key, p in peft.named_parameters():
                if "magnitude" in key:
                    p.mul_(1 + 0.1 * torch.randn_like(p))
        peft.save_pretrained(folder / adapter)
    (folder / "done").touch()
    return folder


def tokenizer(folder):
    """One word for each token: the server wants one."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({f"t{i}": i for i in range(VOCABULARY)}, unk_token="t0"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="t0", bos_token="t1", eos_token="t2").save_pretrained(folder)


def prompts(count, seed):
    gen = random.Random(seed)
    return [[gen.randrange(3, VOCABULARY) for _ in range(gen.randrange(3, LONGEST))] for _ in range(count)]


class Engine:
    def __init__(self, folder, dtype):
        from vllm import LLM

        self.folder, self.ids = folder, {name: i for i, name in enumerate(ADAPTERS, 1)}
        self.llm = LLM(
            str(folder / "model"),
            **{"skip_tokenizer_init": True, "enable_lora": True, "max_lora_rank": 8, "max_loras": SLOTS, "max_cpu_loras": 9},
            **{"max_model_len": 64, "dtype": dtype, "enforce_eager": True, "enable_prefix_caching": False, "seed": 0},
        )

    def request(self, name, path=None, id=None):
        from vllm.lora.request import LoRARequest

        return LoRARequest(name, id or self.ids[name], str(path or self.folder / name))

    def ask(self, asked, whose):
        """For each prompt the tokens, their logprobs and those of the best two."""
        from vllm import SamplingParams

        how = SamplingParams(temperature=0.0, max_tokens=CHOSEN, logprobs=2, ignore_eos=True, detokenize=False)
        requests = [self.request(name) if name else None for name in whose]
        done = self.llm.generate([{"prompt_token_ids": each} for each in asked], how, lora_request=requests, use_tqdm=False)
        out = []
        for each in done:
            (said,) = each.outputs
            out.append((list(said.token_ids), [step[t].logprob for t, step in zip(said.token_ids, said.logprobs, strict=True)]))
        return out

    def model(self):
        """The LoRA manager inside."""
        return self.llm.llm_engine.model_executor.driver_worker.worker.model_runner.lora_manager


def logprobs(folder, name, dtype, asked, said):
    """PEFT's, of all tokens at every place where the engine chose one."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=dtype, attn_implementation="eager")
    if name:
        model = PeftModel.from_pretrained(model, folder / name)
        model = model.double() if dtype == torch.float64 else model
    out = []
    with torch.no_grad():
        for prompt, (tokens, _) in zip(asked, said, strict=True):
            logits = model(input_ids=torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
            out.append(logits.double().log_softmax(-1))
    return out


def judge(folder, name, dtype, asked, said):
    """Raises unless the engine is no worse than PEFT in its dtype. The largest error and its limit."""
    truth, theirs = (logprobs(folder, name, each, asked, said) for each in (torch.float64, dtype))
    chosen = [torch.tensor(tokens)[:, None] for tokens, _ in said]
    pick = lambda tables: torch.cat([t.gather(1, c)[:, 0] for t, c in zip(tables, chosen, strict=True)])  # noqa: E731
    mine, naive, want = torch.cat([torch.tensor(p).double() for _, p in said]), pick(theirs), pick(truth)
    limit = 2 * (naive - want).abs().max() + torch.finfo(dtype).eps * max(table.abs().max() for table in truth)
    error = (mine - want).abs().max()
    assert error <= limit, f"{name}: a logprob is {error:.2e} off, limit {limit:.2e}"
    for table, tokens in zip(truth, chosen, strict=True):
        best = table.max(1).values
        assert ((best - table.gather(1, tokens)[:, 0]) <= 2 * limit).all(), f"{name}: not the best token"
    return error.item(), limit.item()


def engine(name, dtype, work):
    folder = made(name, work)
    running = Engine(folder, dtype)
    wide = getattr(torch, dtype)
    manager = running.model()._adapter_manager
    assert hasattr(manager, "fdora_slots"), "the plug-in is not there"
    asked = prompts(4, 1)

    stock = work / f"stock-{name}-{dtype}.json"
    if stock.exists():
        for adapter, want in json.loads(stock.read_text()).items():
            got = running.ask(asked, [adapter or None] * 4)
            assert json.loads(json.dumps(got)) == want, f"{adapter or 'base'}: other bits than without the plug-in"
        assert manager.fdora_slots.idle.item()
        say("base and LoRA requests: the bits of stock vLLM")

    for adapter in (None, *ADAPTERS):
        said = running.ask(asked, [adapter] * 4)
        error, limit = judge(folder, adapter, wide, asked, said)
        say(f"{adapter or 'base'}: a logprob is at most {error:.1e} off, limit {limit:.1e}")
    plain = running.ask(asked, [None] * 4)
    assert running.ask(asked, ["law"] * 4) != plain

    if stock.exists():
        for adapter, want in json.loads(stock.read_text()).items():
            assert json.loads(json.dumps(running.ask(asked, [adapter or None] * 4))) == want, (
                f"{adapter}: other bits beside DoRA"
            )
        say("the same with DoRA adapters loaded")

    many, order = prompts(64, 2), [name for name in ADAPTERS for _ in range(8)][:64]
    random.Random(3).shuffle(order)
    together, worst = running.ask(many, order), 0.0
    for adapter in ADAPTERS:
        mine = [i for i, who in enumerate(order) if who == adapter]
        if not mine:
            continue
        said = [together[i] for i in mine]
        judge(folder, adapter, wide, [many[i] for i in mine], said)
        for i in mine:
            ((tokens, alone),) = running.ask([many[i]], [adapter])
            same = next((k for k, (a, b) in enumerate(zip(tokens, together[i][0], strict=True)) if a != b), CHOSEN)
            worst = max([worst, *(abs(a - b) for a, b in zip(alone[:same], together[i][1][:same], strict=True))])
    say(f"64 requests over {len(ADAPTERS)} adapters, {SLOTS} slots: each within its limit; at most {worst:.1e} from alone")

    bad(running, work)
    assert running.ask(asked, [None] * 4) == plain, "a bad adapter left something behind"
    say("bad adapters are refused, and the engine goes on")

    adapters = running.llm.llm_engine
    for name in ADAPTERS:
        adapters.remove_lora(running.ids[name])
    size = []
    for k in range(200):
        assert adapters.add_lora(running.request("law", id=100 + k)) and adapters.remove_lora(100 + k)
        if k in (50, 199):
            gc.collect()
            size.append(resident())
    assert not manager.list_adapters() and manager.lora_index_to_id == [None] * SLOTS and manager.fdora_slots.idle.item()
    assert size[1] - size[0] < 8 << 20, size
    say(f"200 adapters loaded and unloaded: {(size[1] - size[0]) / 2**20:.1f} MiB more after the last 150")


def stock(name, dtype, work):
    """What vLLM says without the plug-in."""
    folder = made(name, work)
    running, asked = Engine(folder, dtype), prompts(4, 1)
    assert "fdora.integrations.vllm" not in sys.modules
    found = {adapter: running.ask(asked, [adapter or None] * 4) for adapter in ("", "lora", "small")}
    (work / f"stock-{name}-{dtype}.json").write_text(json.dumps(found))


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def broken(folder, work):
    """Folders of adapters that cannot be served, by what is said of them."""
    from safetensors.torch import load_file, save_file

    first = load_file(folder / "law" / "adapter_model.safetensors")
    m = next(key for key in first if "magnitude" in key and "o_proj" in key)
    B = next(key for key in first if "lora_B" in key and "o_proj" in key)
    faults = {
        "got none of m": {key: t for key, t in first.items() if key != m},
        "finite numbers": first | {m: first[m] * torch.nan},
        "A (r, K), B (N, r) and m (N,)": first | {m: first[m][:-1]},
        "another base model": first | {m: first[m][:32], B: first[B][:32].clone()},
        "none of that name": {key.replace("layers.1.", "layers.7."): t for key, t in first.items()},
    }
    for words, tensors in faults.items():
        path = work / "bad" / words.split("(")[0].replace(" ", "-")
        shutil.copytree(folder / "law", path, dirs_exist_ok=True)
        save_file(tensors, path / "adapter_model.safetensors")
        yield words, path
    path = work / "bad" / "truncated"
    shutil.copytree(folder / "law", path, dirs_exist_ok=True)
    file = path / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    yield "", path


def bad(running, work):
    loaded = running.model().list_adapters()
    for i, (words, path) in enumerate(broken(running.folder, work)):
        try:
            running.llm.llm_engine.add_lora(running.request("bad", path, 50 + i))
        except Exception as error:
            assert words in str(error), f"{words!r} is not in {error}"
        else:
            raise AssertionError(f"{path.name} was loaded")
    assert running.model().list_adapters() == loaded


def http(name, dtype, work):
    """The OpenAI server on the loopback: a DoRA adapter from the command line and one at run time, a client that is killed, bad
    adapters, requests at once."""
    from concurrent.futures import ThreadPoolExecutor

    folder, port = made(name, work), 18431
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(folder / "model"),
        "--port",
        str(port),
    ]
    command += ["--host", "127.0.0.1", "--dtype", dtype, "--enforce-eager", "--max-model-len", "64", "--enable-lora"]
    command += [
        "--max-lora-rank",
        "8",
        "--max-loras",
        str(SLOTS),
        "--max-cpu-loras",
        "9",
        "--lora-modules",
        f"law={folder / 'law'}",
    ]
    command += ["--served-model-name", "base"]
    env = os.environ | {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    server = subprocess.Popen(command, env=env, start_new_session=True)

    def ask(path, **body):
        data = json.dumps(body).encode() if body else None
        request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=300) as reply:
            return reply.read().decode()

    def complete(who, prompt):
        how = {"max_tokens": CHOSEN, "temperature": 0, "logprobs": 0, "ignore_eos": True, "seed": 0}
        (choice,) = json.loads(ask("/v1/completions", model=who, prompt=prompt, **how))["choices"]
        return [int(word[1:]) for word in choice["text"].split()], choice["logprobs"]["token_logprobs"]

    def refused(path, **body):
        try:
            ask(path, **body)
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        raise AssertionError(f"{body} was taken")

    try:
        while True:
            assert server.poll() is None, "the server did not start"
            try:
                ask("/health")
                break
            except OSError:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    server.wait(2)
        asked = prompts(6, 4)
        ask("/v1/load_lora_adapter", lora_name="med", lora_path=str(folder / "med"))
        for who in ("law", "med"):
            error, limit = judge(folder, who, getattr(torch, dtype), asked, [complete(who, p) for p in asked])
            say(f"{who} over HTTP: a logprob is at most {error:.1e} off, limit {limit:.1e}")
        body = {"model": "law", "prompt": asked[0], "max_tokens": 40, "ignore_eos": True, "stream": True}
        command = [sys.executable, "-c", CLIENT, f"http://127.0.0.1:{port}/v1/completions", json.dumps(body)]
        client = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert client.stdout.readline()  # its answer has begun
        client.send_signal(signal.SIGKILL)
        client.wait()
        for i, (words, path) in enumerate(broken(folder, work)):
            status, text = refused("/v1/load_lora_adapter", lora_name=f"bad{i}", lora_path=str(path))
            assert 400 <= status < 600 and words in text, (status, text)
        with ThreadPoolExecutor(12) as pool:
            who = ["law", "med"] * 12
            said = list(pool.map(complete, who, [asked[i % 6] for i in range(24)]))
        for i, each in enumerate(said[:6]):
            judge(folder, who[i], getattr(torch, dtype), [asked[i]], [each])
        ask("/v1/unload_lora_adapter", lora_name="med")
        assert refused("/v1/completions", model="med", prompt=asked[0])[0] == 404
        assert complete("law", asked[0])
        say("a killed client, bad adapters, 24 requests at once, an adapter unloaded: the server goes on")
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(60)


def say(text):
    print(f"  {text}", flush=True)


if __name__ == "__main__":
    what, of, work = sys.argv[1:]
    print(f"{what} {of}", flush=True)
    {"engine": engine, "stock": stock, "http": http}[what](*of.split("-"), Path(work))
