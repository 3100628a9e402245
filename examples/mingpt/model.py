"""A small GPT: a decoder-only transformer, laid out like GPT-2, that predicts the next character.

Source: Vaswani et al., "Attention Is All You Need", arXiv:1706.03762, 2017, for attention; Radford
et al., "Language Models are Unsupervised Multitask Learners", 2019, section 2.3, for where norms
stand and how the projections into the residual stream begin.
"""

import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    """Causal attention: a position sees itself and those before it."""

    def __init__(self, width, num_heads, dropout):
        super().__init__()
        self.num_heads, self.dropout = num_heads, dropout
        self.into_qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        """Map (n, length, width) to the same shape."""
        n, length, width = x.shape
        heads = (n, length, self.num_heads, width // self.num_heads)
        q, k, v = (part.view(heads).transpose(1, 2) for part in self.into_qkv(x).chunk(3, dim=2))
        dropout = self.dropout if self.training else 0.0
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        return self.out(seen.transpose(1, 2).reshape(n, length, width))


class Block(nn.Module):
    """Attention, then a network for each position by itself; each adds to what passes by."""

    def __init__(self, width, num_heads, dropout):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, num_heads, dropout)
        self.inner = nn.Linear(width, 4 * width)
        self.out = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        """Map (n, length, width) to the same shape."""
        x = x + self.dropout(self.attention(self.norm_1(x)))
        return x + self.dropout(self.out(F.gelu(self.inner(self.norm_2(x)))))


class GPT(nn.Module):
    """Tokens, shape (n, length), to logits of those that follow, shape (n, length, vocabulary)."""

    def __init__(self, vocabulary, *, context, num_layers, num_heads, width, dropout):
        super().__init__()
        self.context = context
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, num_heads, dropout) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        self.logits = nn.Linear(width, vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() >= 2:
                # Each block adds twice to the stream: begin small, so that the sum stays at one.
                adds = name.endswith("out.weight")
                nn.init.normal_(parameter, std=0.02 / (2 * num_layers) ** 0.5 if adds else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens):
        """Return the logits; `length` may be anything up to the context's."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.tokens(tokens) + self.positions(places))
        for block in self.blocks:
            x = block(x)
        return self.logits(self.norm(x))

    @torch.no_grad()
    def write(self, tokens, count, *, temperature=0.8, generator=None):
        """Return `tokens`, shape (1, length), with `count` drawn ones behind them."""
        for _ in range(count):
            logits = self(tokens[:, -self.context :])[:, -1] / temperature
            drawn = torch.multinomial(logits.float().softmax(1), 1, generator=generator)
            tokens = torch.cat([tokens, drawn], dim=1)
        return tokens
