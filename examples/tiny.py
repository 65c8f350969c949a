"""What ``--tiny`` trains in the programs beside this one: a Llama of two layers with random weights and sums in words, or an
SDXL as small and four pictures."""

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

LINES = [f"{a} and {b} make {a + b}" for a in range(10) for b in range(10)]


def checkpoint(folder):
    """Writes model and tokenizer as files, to be loaded by name like any other; returns the name and the text."""
    words = ["<pad>", "<s>", "</s>", *sorted({word for line in LINES for word in line.split()})]
    split = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<pad>"))
    split.pre_tokenizer = pre_tokenizers.Whitespace()
    tokens = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=split, **tokens).save_pretrained(folder)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    ids = {"vocab_size": len(words), "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    LlamaForCausalLM(LlamaConfig(**sizes, **ids)).save_pretrained(folder)
    return str(folder), Dataset.from_dict({"text": LINES})


def painter(folder):
    """Writes a pipeline to be loaded by name, and pictures of a disc; returns the name, and the pictures' folder."""
    from diffusers import AutoencoderKL, DDPMScheduler, StableDiffusionXLPipeline, UNet2DConditionModel
    from PIL import Image, ImageDraw
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    ids = {"<start>": 0, "<end>": 1, "a": 2, "photo": 3, "of": 4, "sks": 5, "dog": 6}
    split = Tokenizer(models.WordLevel(ids, unk_token="<end>"))
    split.pre_tokenizer = pre_tokenizers.Whitespace()
    tokens = {"bos_token": "<start>", "eos_token": "<end>", "pad_token": "<end>", "model_max_length": 8}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=split, **tokens)
    sizes = {"vocab_size": len(ids), "hidden_size": 16, "intermediate_size": 32, "projection_dim": 16, "num_hidden_layers": 2}
    words = CLIPTextConfig(**sizes, num_attention_heads=2, max_position_embeddings=8, bos_token_id=0, eos_token_id=1)
    latent = {"block_out_channels": (8, 8), "layers_per_block": 1, "norm_num_groups": 4}
    down, up = ("DownBlock2D", "CrossAttnDownBlock2D"), ("CrossAttnUpBlock2D", "UpBlock2D")
    kinds = {"down_block_types": down, "up_block_types": up, "addition_embed_type": "text_time"}
    widths = {"block_out_channels": (16, 32), "attention_head_dim": 8, "cross_attention_dim": 32, "norm_num_groups": 4}
    more = {"addition_time_embed_dim": 8, "projection_class_embeddings_input_dim": 6 * 8 + 16, "layers_per_block": 1}
    coder = {"down_block_types": ["DownEncoderBlock2D"] * 2, "up_block_types": ["UpDecoderBlock2D"] * 2, "latent_channels": 4}
    StableDiffusionXLPipeline(
        vae=AutoencoderKL(**latent, **coder),
        text_encoder=CLIPTextModel(words),
        text_encoder_2=CLIPTextModelWithProjection(words),
        tokenizer=tokenizer,
        tokenizer_2=tokenizer,
        unet=UNet2DConditionModel(sample_size=8, **kinds, **widths, **more, use_linear_projection=True),
        scheduler=DDPMScheduler(),
    ).save_pretrained(folder / "base")
    (folder / "images").mkdir()
    for n in range(4):
        picture = Image.new("RGB", (32, 32), "white")
        ImageDraw.Draw(picture).ellipse((4 + n, 4, 20 + n, 20), fill="red")
        picture.save(folder / "images" / f"{n}.png")
    return str(folder / "base"), folder / "images"
