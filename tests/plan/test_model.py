"""What is read of a config, what is refused, and which of a model's layers a stage of a pipeline holds."""

import json

import pytest

from fdora import FdoraError
from fdora.jobs.plan import Adapter, Part, Setup, capacity, memory, plan, read_model, times
from tests.plan.test_layout import CONFIG, PROFILE, SETUP, SMALL

FULL, SLIDING = "full_attention", "sliding_attention"
WINDOWS = {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 512}
GEMMA = CONFIG | {"model_type": "gemma3_text", "head_dim": 128, "sliding_window": 512}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "mixtral"}, "router"),
        ({"model_type": "gemma2"}, "soft cap"),
        ({"model_type": "bert"}, "got 'bert'"),
        ({"model_type": "gemma3", "text_config": {}}, "text part"),
        (CONFIG | {"hidden_size": -1}, "'hidden_size'"),
        (CONFIG | {"hidden_size": 1024.0}, "positive integer 'hidden_size', got 1024.0"),
        (CONFIG | {"vocab_size": "4096"}, "'vocab_size', got '4096'"),
        (CONFIG | {"num_hidden_layers": True}, "'num_hidden_layers', got True"),
        (CONFIG | {"model_type": ["llama"]}, r"got \['llama'\]"),
        (CONFIG | {"num_key_value_heads": 3}, "'num_key_value_heads' divides its 8 'num_attention_heads', got 3"),
        (CONFIG | {"num_key_value_heads": 16}, "got 16"),
        (CONFIG | {"head_dim": 127}, "head_dim.*127"),
        (CONFIG | {"hidden_size": 1000}, "head_dim.*125"),
        (CONFIG | {"model_type": "mistral", "sliding_window": "4k"}, "'sliding_window'"),
        (CONFIG | WINDOWS | {"max_window_layers": "2"}, "'max_window_layers' expected int.*'2'"),
        (CONFIG | WINDOWS | {"layer_types": [FULL] * 5}, "each of its 6 layers"),
        (CONFIG | WINDOWS | {"layer_types": ["chunked_attention"] * 6}, "'chunked_attention'"),
        (CONFIG | WINDOWS | {"layer_types": 6}, "'layer_types' has .*, got 6"),
        (CONFIG | WINDOWS | {"layer_types": [SLIDING] * 6, "use_sliding_window": False}, "a window for its sliding layers"),
        (GEMMA | {"sliding_window": None}, "a window for its sliding layers"),
        (GEMMA | {"sliding_window_pattern": 0}, "that transformers reads, got 'ZeroDivisionError"),
    ],
)
def test_models_that_are_refused(config, said):
    with pytest.raises(FdoraError, match=said):
        read_model(config)


def test_other_sizes_are_models():
    """transformers' Mistral and Qwen2 run with heads that do not divide the hidden size."""
    for more in ({"hidden_size": 1028}, {"hidden_size": 1001, "head_dim": 128}):
        assert read_model(CONFIG | {"model_type": "mistral"} | more).head_dim == 128
    assert (
        read_model(CONFIG | {"num_key_value_heads": 8}).kv_heads == read_model(CONFIG | {"num_key_value_heads": None}).kv_heads
    )


@pytest.mark.parametrize("layers", [0, -1, 2.0, "2", True])
def test_other_numbers_of_layers(layers):
    with pytest.raises(FdoraError, match=r"plan: `layers` must be a positive int"):
        read_model(CONFIG, layers)


def test_which_layers_have_a_window():
    """As transformers builds them: qwen2's first ``max_window_layers`` see all tokens, and of gemma3 each sixth."""
    for more, want in [
        ({"max_window_layers": 0}, (0, 1, 2, 3, 4, 5)),
        ({"max_window_layers": -1}, (0, 1, 2, 3, 4, 5)),
        ({"max_window_layers": 2}, (2, 3, 4, 5)),
        ({}, ()),  # 28, more than there are
        ({"layer_types": [FULL] * 6}, ()),
        ({"layer_types": [SLIDING] * 6}, (0, 1, 2, 3, 4, 5)),
        ({"layer_types": [FULL, SLIDING] * 3, "max_window_layers": 0}, (1, 3, 5)),
        ({"use_sliding_window": False, "max_window_layers": 0}, ()),
        ({"sliding_window": None, "max_window_layers": 0}, ()),
        ({"model_type": "mistral"}, (0, 1, 2, 3, 4, 5)),
        ({"model_type": "mistral", "sliding_window": None}, ()),
        ({"model_type": "llama"}, ()),
        ({"model_type": "gemma3_text"}, (0, 1, 2, 3, 4)),
        ({"model_type": "gemma3_text", "sliding_window_pattern": 2}, (0, 2, 4)),
        ({"model_type": "gemma3_text", "sliding_window_pattern": 1, "sliding_window": None}, ()),
    ]:
        found = read_model(CONFIG | WINDOWS | more)
        assert (found.sliding, found.window) == (want, 512 if want else 0), more
    left_out = {key: value for key, value in (CONFIG | {"model_type": "mistral"}).items() if key != "sliding_window"}
    assert read_model(left_out).window == 4096  # as MistralConfig


def test_fewer_and_more_layers_than_the_config_has():
    """The first of those that it names; without names, as many as are asked for."""
    assert read_model(GEMMA, 13).sliding == (*range(5), *range(6, 11), 12)
    named = GEMMA | {"layer_types": [SLIDING, FULL] * 3}
    assert read_model(named, 3).sliding == (0, 2)
    with pytest.raises(FdoraError, match=r"`layers` must be at most the 6 of 'layer_types', got 7"):
        read_model(named, 7)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda m: memory(m, SETUP, 0), "`tokens` must be a positive int, got 0"),
        (lambda m: memory(m, SETUP, 1024, in_flight=-1), "`in_flight` must be a positive int, got -1"),
        (lambda m: memory(m, SETUP._replace(weights="int3"), 1024), "`weights` must be one of"),
        (lambda m: memory(m, SETUP._replace(adapters=()), 1024), "`adapters` must be at least one"),
        (lambda m: capacity(m, SETUP, 0), "`budget` must be a positive int, got 0"),
        (lambda m: capacity(m, SETUP, 2.5e9), "`budget` must be a positive int, got 2500000000.0"),
        (lambda m: capacity(m, SETUP._replace(targets=frozenset(["lm_head"])), 2**30), "`targets` must be some of"),
    ],
)
def test_arguments_of_memory_and_capacity(call, said):
    with pytest.raises(FdoraError, match=said):
        call(read_model(CONFIG))


def test_a_stage_has_the_layers_that_it_holds():
    """Layers 4 to 7 of a Gemma 3: windows, all tokens in the sixth, windows; not the four windows at its beginning."""
    model, ours, begin = read_model(GEMMA, 12), Part(4, False, False, start=4), Part(4, False, False)
    alone = read_model(GEMMA | {"num_hidden_layers": 4, "layer_types": [SLIDING, FULL, SLIDING, SLIDING]})
    for setup in (SETUP, SETUP._replace(checkpointing=True)):
        held, same = memory(model, setup, 1024, ours), memory(alone, setup, 1024, begin)
        assert held._replace(at="") == same._replace(at="")
        at = times(model, setup, 1024, PROFILE, ours)
        assert at == times(alone, setup, 1024, PROFILE, begin)
        more = times(model, setup, 1024, PROFILE, begin).forward - at.forward
        # of a layer with a window: k and v once for each q, a mask to be added, and all is compared with all, by two products
        moved = 2 * 2 * (256 + 1024) * 1024 + (1 + 2) * 1024 * 1024
        assert more == pytest.approx(moved / PROFILE.bytes + 2 * 1024**3 / PROFILE.attention)
    assert memory(model, SETUP, 1024, ours).activations < memory(model, SETUP, 1024, begin).activations  # a mask less
    short = SETUP._replace(length=256)  # no longer than a window: nothing is masked
    assert memory(model, short, 1024, ours)._replace(at="") == memory(model, short, 1024, begin)._replace(at="")


@pytest.mark.parametrize("more", [{}, {"layer_types": [FULL] * 3 + [SLIDING] * 3}], ids=["each sixth", "the last three"])
def test_stages_are_together_the_model(more):
    model, setup = read_model(GEMMA | more), SETUP._replace(length=2048)
    parts = (Part(2, True, False), Part(1, False, False, 2), Part(3, False, True, 3))
    whole, each = times(model, setup, 2048, PROFILE), [times(model, setup, 2048, PROFILE, part) for part in parts]
    assert sum(time.forward for time in each) == pytest.approx(whole.forward)
    assert sum(time.backward for time in each) == pytest.approx(whole.backward)


def pipeline(model, setup):
    ways = plan(model, setup, gpu=SMALL._replace(bytes=2**36), gpus=2).layouts
    return next(way for way in ways if (way.kind, way.fuse, way.checkpointing) == ("pipeline", False, False))


@pytest.mark.parametrize("types", [[FULL] * 3 + [SLIDING] * 3, [SLIDING] * 3 + [FULL] * 3], ids=["second", "first"])
def test_a_pipeline_plans_each_stage_by_its_own_layers(types):
    setup = SETUP._replace(length=2**15, loss_tokens=1)
    model, full, every = (read_model(GEMMA | {"layer_types": kinds}) for kinds in (types, [FULL] * 6, [SLIDING] * 6))
    found, none, all_ = (pipeline(each, setup) for each in (model, full, every))
    assert found.stages == none.stages == all_.stages == (3, 3)
    assert none.seconds < found.seconds < all_.seconds
    parts = {Part(3, True, False): 2, Part(3, False, True, start=3): 1}  # with so many of two microbatches at once
    held = [memory(model, setup._replace(microbatches=2), 2**15, part, flight) for part, flight in parts.items()]
    assert found.memory == max(held, key=lambda memory: memory.peak)
    # so long, three masks weigh more than a second microbatch
    assert [memory.peak for memory in held].index(found.memory.peak) == types.index(SLIDING) // 3


def test_the_head_counts_in_layers_on_average():
    """Whichever layer is the first: the others are not as long."""
    setup, sizes = SETUP._replace(length=4096), GEMMA | {"num_hidden_layers": 12, "vocab_size": 131072}
    for types in ([SLIDING] + [FULL] * 11, [FULL] * 11 + [SLIDING]):
        assert pipeline(read_model(sizes | {"layer_types": types}), setup).stages == (9, 3)


def test_a_plan_says_which_layers_have_a_window():
    found = plan(read_model(GEMMA), Setup(1024, (Adapter("a", 4),)), gpu=SMALL).to_dict()
    assert json.loads(json.dumps(found))["model"]["sliding"] == [0, 1, 2, 3, 4]
