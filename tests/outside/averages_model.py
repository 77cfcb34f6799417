"""The model of :mod:`averages`, which only ranks import."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule
from torch.nn import functional


class Model(MegatronModule):
    """Model that predicts each token from the mean of the embeddings before it."""

    def __init__(self, args: Namespace, config: Any, vocabulary: int) -> None:
        super().__init__(config)
        self.pre_process = self.post_process = True
        self.share_embeddings_and_output_weights = False
        self.token_embedding = torch.nn.Embedding(vocabulary, args.hidden_size)
        self.output = torch.nn.Linear(args.hidden_size, vocabulary, bias=False)

    def set_input_tensor(self, input_tensor: Any) -> None:
        """Do nothing: there is no previous stage."""

    def forward(self, input_ids: Any, position_ids: Any, attention_mask: Any, labels: Any) -> Any:
        embeddings = self.token_embedding(input_ids)
        means = embeddings.cumsum(1) / (position_ids[..., None] + 1)
        logits = self.output(means).float()
        losses = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        return losses.view(labels.shape)
