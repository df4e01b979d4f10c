"""The gpt of configs/gpt.toml in PyTorch, with its batch and its optimizer."""

import pathlib
import sys
import tomllib

import torch

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "parity"))
from gpt import Gpt, contexts, loss_of

CONFIG = tomllib.loads((ROOT / "configs" / "gpt.toml").read_text())


def build():
    """The model, its loss, and a batch."""
    sizes = {key: CONFIG[key] for key in ["n_layer", "n_head", "n_embd", "block_size"]}
    text = (ROOT / "configs" / CONFIG["dataset"].removeprefix("text:")).read_bytes()
    batch = contexts(text, CONFIG["batch_size"], CONFIG["block_size"])
    return Gpt(**sizes, bias=not CONFIG.get("no_bias", False)), loss_of, *batch


def optimizer_of(model):
    """AdamW, and the largest norm of the gradients."""
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1]},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    settings = {"lr": CONFIG["lr"], "weight_decay": CONFIG["weight_decay"]}
    settings["betas"] = CONFIG.get("beta1", 0.9), CONFIG["beta2"]
    # ddp-mp's kernel; PyTorch's default on a CPU is slower.
    return torch.optim.AdamW(groups, **settings, fused=True), CONFIG["max_grad_norm"]
