"""A GPT in PyTorch: the shape, the names and the initial values of nanoGPT's, without dropout."""

import math

from torch import arange, frombuffer, nn, uint8
from torch.nn.functional import cross_entropy, gelu, linear, scaled_dot_product_attention

STD = 0.02  # of GPT-2's initial weights


class Block(nn.Module):
    """Attention and an mlp, each with a norm before and a sum with its input after."""

    def __init__(self, width, heads, bias):
        super().__init__()
        self.heads = heads

        def pair(first, columns, rows):
            """A layer that widens, and `c_proj`, which comes back to the width."""
            layers = {first: nn.Linear(width, columns, bias), "c_proj": nn.Linear(rows, width, bias)}
            return nn.ModuleDict(layers)

        self.ln_1 = nn.LayerNorm(width, bias=bias)
        self.attn = pair("c_attn", 3 * width, width)
        self.ln_2 = nn.LayerNorm(width, bias=bias)
        self.mlp = pair("c_fc", 4 * width, 4 * width)

    def attend(self, x):
        of_heads = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.attn["c_attn"](x).chunk(3, dim=-1)
        )
        seen = scaled_dot_product_attention(*of_heads, is_causal=True)
        return self.attn["c_proj"](seen.transpose(1, 2).flatten(2))

    def forward(self, x):
        x = x + self.attend(self.ln_1(x))
        return x + self.mlp["c_proj"](gelu(self.mlp["c_fc"](self.ln_2(x))))


class Gpt(nn.Module):
    """Logits of the next token at each position."""

    def __init__(self, n_layer, n_head, n_embd, block_size, vocab_size=256, bias=True):
        super().__init__()
        self.transformer = nn.ModuleDict()
        self.transformer["wte"] = nn.Embedding(vocab_size, n_embd)
        self.transformer["wpe"] = nn.Embedding(block_size, n_embd)
        self.transformer["h"] = nn.ModuleList(Block(n_embd, n_head, bias) for _ in range(n_layer))
        self.transformer["ln_f"] = nn.LayerNorm(n_embd, bias=bias)
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)
        self.lm_head.weight = self.transformer["wte"].weight

        for layer in self.modules():
            if isinstance(layer, (nn.Linear, nn.Embedding)):
                nn.init.normal_(layer.weight, std=STD)
            if isinstance(layer, nn.Linear) and bias and layer is not self.lm_head:
                nn.init.zeros_(layer.bias)
        for name, parameter in self.named_parameters():
            if name.endswith("c_proj.weight"):
                nn.init.normal_(parameter, std=STD / math.sqrt(2 * n_layer))

    def forward(self, tokens):
        layers = self.transformer
        x = layers["wte"](tokens) + layers["wpe"](arange(tokens.shape[1]))
        for block in layers["h"]:
            x = block(x)
        return linear(layers["ln_f"](x), self.lm_head.weight)


def loss_of(logits, tokens):
    """The mean cross-entropy of all positions."""
    return cross_entropy(logits.flatten(0, 1), tokens.flatten())


def contexts(text, count, block_size):
    """The first contexts of a text, and the tokens that follow each of theirs."""
    tokens = frombuffer(bytearray(text[: count * block_size + 1]), dtype=uint8).long()
    return tokens[:-1].view(count, block_size), tokens[1:].view(count, block_size)
