"""A decoder as pretraining programs write them: blocks in a ModuleDict by number, buffers that no file holds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY, WIDTH, HIDDEN, LENGTH, EXPERTS = 19, 8, 12, 6, 4


class Block(nn.Module):
    """What came before, averaged, and a layer of its own; `experts` makes that a mixture of them."""

    def __init__(self, experts: bool = False) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH, bias=False)
        self.moe_enabled = experts
        if experts:
            self.moe = Mixture()
        else:
            self.up, self.down = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        past = (self.norm(x) * angles.to(x.dtype)).cumsum(1) / x.shape[1]
        x = x + self.mix(past)
        return x + (self.moe(x) if self.moe_enabled else self.down(torch.tanh(self.up(x))))


class Experts(nn.Module):
    """Of each expert two matrices: [EXPERTS, WIDTH, HIDDEN] and [EXPERTS, HIDDEN, WIDTH]."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(EXPERTS, WIDTH, HIDDEN))
        self.w2 = nn.Parameter(torch.empty(EXPERTS, HIDDEN, WIDTH))

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        """`x` [tokens, WIDTH], `weights` [tokens, EXPERTS] -> [tokens, WIDTH]."""
        w1, w2 = (w.to_local() if hasattr(w, "to_local") else w for w in (self.w1, self.w2))
        inner = torch.tanh(torch.einsum("tw,ewh->eth", x, w1))
        return torch.einsum("eth,ehw,te->tw", inner, w2, weights)


class Mixture(nn.Module):
    """All experts of every token, weighted by a router; `around` is what tokens pass through to other ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS, bias=False), Experts()
        self.around: Any = None

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weights = self.router(flat).softmax(-1)
        found = self.experts(flat, weights) if self.around is None else self.around(self.experts, flat, weights)
        return found.view_as(x)


class Decoder(nn.Module):
    """Tokens [batch, LENGTH] -> [batch, LENGTH, VOCABULARY], or with `skip_output` [batch, LENGTH, WIDTH]."""

    def __init__(self, experts: bool = False, blocks: int = 3) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleDict({str(number): Block(experts and number > 0) for number in range(blocks)})
        self.norm = nn.RMSNorm(WIDTH)
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.register_buffer("angles", torch.empty(LENGTH, WIDTH), persistent=False)
        self.skip_output = False

    def init_weights(self) -> None:
        """On any device, of whole parameters or this rank's parts of them."""
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.dim() > 1:
                    nn.init.trunc_normal_(parameter, std=0.3)
                else:
                    nn.init.ones_(parameter)
            self.angles.copy_(torch.linspace(0.5, 1, LENGTH)[:, None].expand(LENGTH, WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for block in self.layers.values():
            x = block(x, self.angles)
        x = self.norm(x)
        return x if self.skip_output else self.output(x)


def plain_decoder(**settings: Any) -> Decoder:
    """The same on every rank."""
    torch.manual_seed(4)
    model = Decoder(**settings)
    model.init_weights()
    return model


def tokens_of(step: int, rank: int, samples: int = 2) -> Tensor:
    """[samples, LENGTH + 1]: inputs, and one further along what they are to predict."""
    source = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(VOCABULARY, (samples, LENGTH + 1), generator=source)


def loss_of(model: nn.Module, tokens: Tensor, reduction: str = "mean") -> Tensor:
    scores = model(tokens[:, :-1])
    return nn.functional.cross_entropy(scores.flatten(0, 1).float(), tokens[:, 1:].flatten(), reduction=reduction)
