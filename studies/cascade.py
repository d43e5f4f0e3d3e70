"""DIRECTOR's cascade: single-layer transformers that forecast a prompt's experts from its token embeddings.

The first stage reads the embeddings; each next one reads them with the routing that the stage before has
predicted, and predicts its own block of layers (section V-A). One stage is the paper's naive predictor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn


class Cascade(nn.Module):
    """Predicts logits of every expert in every layer for each token.

    Args:
        embedding: [V, D] the served model's token embeddings; they stay as they are.
        layers, experts: L and E of the served model.
        stages: transformers in the cascade; L must divide by it.
        width: of each.

    Raises:
        ValueError: layers that do not divide by the stages.
    """

    def __init__(
        self, embedding: Tensor, layers: int, experts: int, *, stages: int, width: int = 96, heads: int = 4
    ) -> None:
        super().__init__()
        if stages < 1 or layers % stages:
            raise ValueError(f"{layers} layers do not divide by {stages} stages")
        self.layers, self.experts = layers, experts
        block = layers // stages
        self.register_buffer("embedding", embedding.detach().float(), persistent=False)
        self.read = nn.Linear(embedding.shape[1], width)
        self.stages = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, 2 * width, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(stages)
        )
        self.heads = nn.ModuleList(nn.Linear(width, block * experts) for _ in range(stages))
        self.context = nn.ModuleList(nn.Linear(block * experts, width) for _ in range(stages - 1))

    def forward(self, tokens: Tensor) -> Tensor:
        """float[B, T, L, E] of token ids [B, T]; a token sees the ones before it."""
        assert isinstance(self.embedding, Tensor)
        read = self.read(self.embedding[tokens])
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        found: list[Tensor] = []
        for number, (stage, head) in enumerate(zip(self.stages, self.heads, strict=True)):
            state = read
            if number:
                before = found[-1].softmax(-1).flatten(2)
                state = state + self.context[number - 1](before)
            state = stage(state, src_mask=mask, is_causal=True)
            found.append(head(state).unflatten(-1, (-1, self.experts)))
        return torch.cat(found, 2)

    @property
    def num_parameters(self) -> int:
        """Of the predictor itself, without the served model's embeddings."""
        return sum(p.numel() for p in self.parameters())


def train_cascade(
    model: Cascade,
    sequences: Sequence[Tensor],
    routes: Sequence[Tensor],
    *,
    steps: int,
    batch: int = 16,
    length: int = 256,
    learning_rate: float = 3e-3,
    seed: int = 0,
    report: Callable[[int, float], None] | None = None,
) -> None:
    """Fit the cascade to captured routes: cross-entropy against the k chosen experts of each layer.

    Args:
        sequences: token ids [T] of each request.
        routes: [T, L, k] the experts of each of its tokens.
        steps: of AdamW, the rate falling linearly after a warm-up of a twentieth.
        length: tokens; of a longer request a random stretch, and shorter ones are padded.
        report: called with each step and its loss.
    """
    draw = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.01)
    warm_up = max(1, steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda n: min((n + 1) / warm_up, max(0.02, 1 - n / steps))
    )
    model.train()
    for step in range(steps):
        chosen = torch.randint(len(sequences), (batch,), generator=draw).tolist()
        tokens = torch.zeros(batch, length, dtype=torch.long)
        truth = torch.full((batch, length, *routes[0].shape[1:]), -1, dtype=torch.long)
        for row, request in enumerate(chosen):
            longest = len(sequences[request])
            start = int(torch.randint(max(longest - length, 0) + 1, (1,), generator=draw))
            taken = slice(start, min(start + length, longest))
            tokens[row, : taken.stop - start] = sequences[request][taken]
            truth[row, : taken.stop - start] = routes[request][taken].long()
        real = truth[:, :, 0, 0] >= 0
        logits = model(tokens)[real].log_softmax(-1)
        loss = -logits.gather(-1, truth[real]).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
        if report is not None:
            report(step, loss.item())
    model.eval()


@torch.no_grad()
def predict_routes(model: Cascade, tokens: Tensor, top_k: int) -> Tensor:
    """int[T, L, k] the likeliest experts of each token of a request [T]."""
    found: Tensor = model(tokens[None])[0].topk(top_k, dim=-1).indices
    return found
