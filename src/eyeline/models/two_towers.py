"""SigLIP's two towers (Zhai et al. 2023; Tschannen et al. 2025): an image and a text become vectors of one space, and the cosine of the
two says how well they go together. The reference's classes are `SiglipModel` and, for NaFlex, `Siglip2Model`.

Only scores are computed here, with weights as they are stored: nothing of this trains.

Dims: N images  M texts  T tokens of a text  P patches of all images end to end  D width  H heads  K head dim  E width of the vectors
"""

import torch
from pydantic import model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from eyeline.core.settings import Positive, PositiveFloat, Settings
from eyeline.models import siglip2
from eyeline.models.layers import Embedding, GeluMLP, LayerNorm, Linear, Positions


class TextConfig(Settings):
    """The text tower."""

    vocab_size: Positive
    max_positions: Positive  # tokens of every text: shorter ones are padded, and longer ones cut
    hidden_size: Positive
    layers: Positive
    heads: Positive
    intermediate_size: Positive
    embedding_size: Positive
    eps: PositiveFloat = 1e-6


class Config(Settings):
    """Both towers."""

    vision: siglip2.Config
    text: TextConfig
    lower_case: bool = False  # texts are put in lower case first

    @model_validator(mode="after")
    def _fits(self) -> "Config":
        if self.text.embedding_size != self.vision.hidden_size:
            raise ValueError(
                f"vectors of texts have embedding_size={self.text.embedding_size}, and those of images {self.vision.hidden_size}; wanted "
                "equal ones"
            )
        if self.text.hidden_size % self.text.heads:
            raise ValueError(f"heads={self.text.heads} must divide hidden_size={self.text.hidden_size}")
        return self


class Pool(nn.Module):
    """Attention of one learned query to the patches of each image."""

    def __init__(self, c: siglip2.Config):
        super().__init__()
        self.K = c.hidden_size // c.heads
        self.probe_11D = nn.Parameter(torch.empty(1, 1, c.hidden_size))
        self.qkv, self.o = Linear(c.hidden_size, 3 * c.hidden_size), Linear(c.hidden_size, c.hidden_size)
        self.norm, self.mlp = LayerNorm(c.hidden_size, c.eps), GeluMLP(c.hidden_size, c.intermediate_size)

    def forward(self, x_PD: Tensor, patches_N: list[int]) -> Tensor:
        weights, biases = self.qkv.weight.chunk(3), self.qkv.bias.chunk(3)
        rows = (self.probe_11D[0], x_PD, x_PD)
        q_1HK, k_PHK, v_PHK = (F.linear(x, w, b).unflatten(-1, (-1, self.K)) for x, w, b in zip(rows, weights, biases, strict=True))
        q_H1K, pooled = q_1HK.transpose(0, 1), list[Tensor]()
        for k, v in zip(k_PHK.split(patches_N), v_PHK.split(patches_N), strict=True):
            out_H1K = F.scaled_dot_product_attention(q_H1K[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None])[0]
            pooled.append(out_H1K.transpose(0, 1).flatten(1))
        x_ND = self.o(torch.cat(pooled))
        return x_ND + self.mlp(self.norm(x_ND))


class TextTower(nn.Module):
    """Tokens see the whole text, padding included, as in training; the last position stands for all."""

    def __init__(self, c: TextConfig):
        super().__init__()
        self.embed, self.positions = Embedding(c.vocab_size, c.hidden_size), Positions(c.max_positions, c.hidden_size)
        self.blocks = nn.ModuleList(siglip2.Block(c) for _ in range(c.layers))
        self.norm, self.head = LayerNorm(c.hidden_size, c.eps), Linear(c.hidden_size, c.embedding_size)

    def forward(self, tokens_MT: Tensor) -> Tensor:
        M, T = tokens_MT.shape
        x_TD = (self.embed(tokens_MT) + self.positions.weight[:T]).flatten(0, 1)
        cu_M1 = torch.arange(M + 1, dtype=torch.int32, device=x_TD.device) * T
        for block in self.blocks:
            x_TD = block(x_TD, cu_M1, T)
        return self.head(self.norm(x_TD).unflatten(0, (M, T))[:, -1])


class Model(nn.Module):
    """Vectors of length 1."""

    def __init__(self, c: Config):
        super().__init__()
        self.vision, self.pool, self.text = siglip2.Model(c.vision), Pool(c.vision), TextTower(c.text)

    def images(self, patches_PC: Tensor, places_P2: Tensor, grids_N2: Tensor, patches_N: list[int]) -> Tensor:
        """uint8 patches of all images, those of one after those of another -> a vector for each."""
        cu_N1 = torch.tensor([0, *patches_N], dtype=torch.int32, device=patches_PC.device).cumsum(0, dtype=torch.int32)
        features_PD = self.vision(patches_PC, places_P2, grids_N2, cu_N1, max(patches_N))
        return F.normalize(self.pool(features_PD, patches_N), dim=-1)

    def texts(self, tokens_MT: Tensor) -> Tensor:
        """Token ids of texts of one length -> a vector for each."""
        return F.normalize(self.text(tokens_MT), dim=-1)
