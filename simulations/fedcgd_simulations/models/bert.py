"""BERT from Transformers, as a function of token ids alone."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedcgd_simulations.models.lora import add_lora

VOCABULARY = 30522
SHAPES = {  # layers, heads, hidden, intermediate
    "bert-tiny": (2, 2, 128, 512),
    "bert-base": (12, 12, 768, 3072),
    "bert-large": (24, 16, 1024, 4096),
}


class TokenClassifier(nn.Module):
    """Token ids (batch, length), 0 for padding → logits of a BERT classifier.

    Positions and segments are given for each example, so that every layer sees a batch, as Opacus expects.
    """

    def __init__(self, bert: nn.Module) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device).repeat(len(tokens), 1)
        # As an additive mask, which Transformers takes as it is: no branch on the data, which vmap could not follow.
        mask = torch.zeros(tokens.shape, device=tokens.device).masked_fill(tokens == 0, torch.finfo(torch.float32).min)
        logits: Tensor = self.bert(
            input_ids=tokens,
            attention_mask=mask[:, None, None, :].expand(-1, 1, tokens.shape[1], -1),
            token_type_ids=torch.zeros_like(tokens),
            position_ids=positions,
        ).logits
        return logits


def bert(name: str, folder: Path | None, *, classes: int = 2, lora_rank: int | None = None) -> nn.Module:
    """The model `name` from the files in `folder` (Transformers' format), or with random weights for None.

    Without dropout: clipping and noise regularise, and the same example then has the same gradient. With `lora_rank`
    only LoRA of that rank on queries and values, and the head, are trained.
    """
    try:
        from transformers import BertConfig, BertForSequenceClassification
    except ImportError as error:
        raise ValueError(f"{name} needs Transformers; install it with `pip install transformers`") from error

    options: dict[str, Any] = {
        "num_labels": classes,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "attn_implementation": "eager",
    }
    if folder is not None:
        model = BertForSequenceClassification.from_pretrained(str(folder), local_files_only=True, **options)
    else:
        layers, heads, hidden, intermediate = SHAPES[name]
        config = BertConfig(
            vocab_size=VOCABULARY,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            hidden_size=hidden,
            intermediate_size=intermediate,
            **options,
        )
        model = BertForSequenceClassification(config)
    if lora_rank is None:
        return TokenClassifier(model)
    return TokenClassifier(
        add_lora(
            model,
            rank=lora_rank,
            adapt=lambda part: part.endswith(("self.query", "self.value")),
            train=lambda part: part.startswith("classifier."),
        )
    )
