"""The shapes that are measured: Qwen3 by hand, with random weights made where they are used.

Speed does not depend on what the weights are, so none are downloaded. `tiny` is for trying a bench on a CPU.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

from stretto.models.checksums import checksum
from stretto.models.lora import adapted_modules, write_adapter
from stretto.models.lora_options import LoraOptions
from stretto.types import Weights

DTYPES = ("bfloat16", "float16", "float32")
RANK = 16
SCALE = 2.0  # alpha is twice the rank, as in the recipes


@dataclass(frozen=True, slots=True)
class Shape:
    """What differs between the sizes of one family, in the words of the configuration."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    tie_word_embeddings: bool
    head_dim: int = 128
    vocab_size: int = 151_936
    max_position_embeddings: int = 40_960
    num_experts: int = 0  # 0: a dense model
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0

    @property
    def values(self) -> dict[str, Any]:
        """The keys of the configuration."""
        found = asdict(self)
        return {key: value for key, value in found.items() if self.num_experts or key not in EXPERTS}


EXPERTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")

SHAPES = {
    "tiny": Shape(64, 128, 2, 4, 2, True, head_dim=16, vocab_size=256, max_position_embeddings=4_096),
    "0.6B": Shape(1_024, 3_072, 28, 16, 8, True),
    "1.7B": Shape(2_048, 6_144, 28, 16, 8, True),
    "4B": Shape(2_560, 9_728, 36, 32, 8, True),
    "8B": Shape(4_096, 12_288, 36, 32, 8, False),
    # Mixtures of experts. The second has the shapes of Qwen3-30B-A3B with 12 of its 48 layers.
    "tiny-moe": Shape(
        64,
        128,
        2,
        4,
        2,
        True,
        head_dim=16,
        vocab_size=256,
        max_position_embeddings=4_096,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
    ),
    "30B-A3B-12": Shape(
        2_048, 6_144, 12, 32, 4, False, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768
    ),
}


def config_of(size: str) -> Any:
    """The configuration of a size. No token ends a text: lengths are what a bench asks for."""
    if size not in SHAPES:
        raise ValueError(f"`--sizes {size}` is not known; there are {', '.join(SHAPES)}")
    mixture = SHAPES[size].num_experts > 0
    kind = Qwen3MoeConfig if mixture else Qwen3Config
    return kind(
        **SHAPES[size].values,
        **({"norm_topk_prob": True} if mixture else {}),
        architectures=["Qwen3MoeForCausalLM" if mixture else "Qwen3ForCausalLM"],
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        dtype="bfloat16",
    )


def add_dtype(parser: argparse.ArgumentParser) -> None:
    """The option `--dtype`, for benches that can do with another type than the usual one."""
    parser.add_argument("--dtype", choices=DTYPES, help="of the weights; default: bfloat16 on a GPU, float32 on a CPU")


def dtype_of(device: torch.device | str, dtype: str | None = None) -> torch.dtype:
    """What weights are kept in: what is asked for, else bfloat16 where it is fast and float32 on a processor."""
    if dtype is not None:
        asked: torch.dtype = getattr(torch, dtype)
        return asked
    return torch.bfloat16 if torch.device(device).type == "cuda" else torch.float32


def dtype_parameter(options: argparse.Namespace) -> dict[str, str]:
    """The type as a parameter of a cell: nothing where it is the usual one."""
    usual = dtype_of(options.device) == dtype_of(options.device, options.dtype)
    return {} if usual else {"dtype": options.dtype}


def make_model(size: str, device: torch.device | str, seed: int = 0, dtype: str | None = None) -> Any:
    """A causal LM of that size with random weights, made on the device and never on the host."""
    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config_of(size), dtype=dtype_of(device, dtype))
    return model.eval()


def skeleton(size: str) -> Any:
    """The same modules without memory, for names and sizes."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config_of(size), dtype=torch.bfloat16)


def base_weights(model: Any, version: int = 0) -> Weights:
    """The model's own parameters as a version, for an engine without adapters."""
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return Weights(version, "full", tensors, checksum(tensors))


def adapter(model: Any, version: int, rank: int = RANK) -> Weights:
    """A random adapter of every linear layer but the head, small enough to leave the logits finite."""
    any_parameter = next(model.parameters())
    generator = torch.Generator(any_parameter.device).manual_seed(1_000 + version)
    tensors = _adapter_tensors(model, rank, generator, any_parameter.dtype)
    return Weights(version, "lora", tensors, checksum(tensors, SCALE), SCALE)


def write_adapter_folder(folder: Path, size: str, version: int, rank: int = RANK) -> Path:
    """A random PEFT adapter folder in bfloat16, made without the model."""
    model = skeleton(size)
    generator = torch.Generator().manual_seed(1_000 + version)
    tensors = _adapter_tensors(model, rank, generator, torch.bfloat16)
    options = LoraOptions(rank=rank, alpha=SCALE * rank)
    write_adapter(folder, tensors, options=options, base=size, names=tuple(adapted_modules(model)))
    return folder


def _adapter_tensors(model: Any, rank: int, generator: torch.Generator, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for name, module in adapted_modules(model).items():
        shapes = {"lora_A": (rank, module.in_features), "lora_B": (module.out_features, rank)}
        for part, shape in shapes.items():
            drawn = torch.randn(shape, generator=generator, device=generator.device)
            tensors[f"{name}.{part}"] = (drawn * 0.02).to(dtype)
    return tensors


def write_config_folder(folder: Path, size: str) -> Path:
    """A folder with a `config.json` and nothing else: what `load_format="dummy"` needs."""
    config_of(size).save_pretrained(folder)
    return folder
