"""Images dealt over ranks before the tower, and their visual tokens sent to where they are shown (`mesh.balance_images`).

A tower sees one image at a time, so it does not matter where that happens: losses and gradients stay what they were. Every rank knows
how many patches each image has (`core/step.py: Slot`), so all know all ways, and only what is computed with is sent.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from eyeline.core.batch import Batch
from eyeline.core.encoders import Images
from eyeline.core.image_rule import ImageRule
from eyeline.core.plan import Plan
from eyeline.core.step import Slot
from eyeline.parallel.exchange import exchange_rows, exchanged

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Ways(NamedTuple):
    """Where the images of a micro-batch go, as one rank sees it. Ranks that share a pack all show its images: one of them sends the patches
    of an image to its encoder, and all get its visual tokens."""

    order: list[int]  # the images that are shown here, as their tokens arrive
    own: list[int]  # patches of these, in the order of the batch
    sent: list[int]  # the images of them whose patches this rank sends, as they are sent
    images_out: list[int]  # to each rank
    images_in: list[int]  # from each rank
    patches_out: list[int]
    patches_in: list[int]
    encoded: list[int]  # patches of each image that is encoded here: those of a pack follow one another
    by_pack: list[int]  # patches of all these, by the pack that shows them
    tokens_in: list[int]  # patches whose tokens come from each rank


def ways_of(patches: Sequence[Sequence[int]], encoders: Images, rank: int, sharing: int = 1) -> Ways:
    """`patches[g]` are those of the images of pack g, which the ranks from g · `sharing` on show."""
    packs, ranks, pack = range(len(patches)), range(len(patches) * sharing), rank // sharing
    own, by = patches[pack], encoders[pack]

    def sender(of: int, encoder: int) -> int:
        """The encoder itself, where it shows the image; else the rank of the pack that is in the same place there."""
        return encoder if encoder // sharing == of else of * sharing + encoder % sharing

    arriving = [  # from each rank: patches of its pack's images that are encoded here and that it sends
        [n for n, to in zip(patches[s // sharing], encoders[s // sharing], strict=True) if to == rank and sender(s // sharing, rank) == s]
        for s in ranks
    ]
    sent = sorted((n for n in range(len(own)) if sender(pack, by[n]) == rank), key=lambda n: (by[n], n))
    out = [[own[n] for n in sent if by[n] == r] for r in ranks]
    return Ways(
        order=sorted(range(len(own)), key=lambda n: (by[n], n)),
        own=list(own),
        sent=sent,
        images_out=[len(some) for some in out],
        images_in=[len(some) for some in arriving],
        patches_out=[sum(some) for some in out],
        patches_in=[sum(some) for some in arriving],
        encoded=[n for some in arriving for n in some],
        by_pack=[sum(map(sum, arriving[g * sharing : (g + 1) * sharing])) for g in packs],
        tokens_in=[sum(n for n, to in zip(own, by, strict=True) if to == r) for r in ranks],
    )


def rows_of(images: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """The rows of some images, in this order, where image n has `sizes[n]` rows and all are stored end to end."""
    ends = torch.tensor([0, *sizes]).cumsum(0).tolist()
    return torch.cat([torch.arange(ends[n], ends[n + 1]) for n in images] or [torch.empty(0, dtype=torch.int64)])


class ImageExchange:
    """The ranks that share out images, of which so many share each pack. While a micro-batch runs, `deliver` sends its visual tokens
    home."""

    def __init__(self, group: "ProcessGroup", sharing: int = 1):
        self.group, self.sharing = group, sharing
        self.rule: ImageRule | None = None  # of the model that was placed last
        self._ways: Ways | None = None

    def join(self, plan: Plan[Any]) -> None:
        """Let the visual tokens of a planned model pass through here."""
        self.rule = plan.spec.image
        for (_, kind), names in plan.replaceable.items():
            for name in names if kind == "deliver" else ():
                path, _, leaf = name.rpartition(".")
                setattr(plan.model.get_submodule(path), leaf, Home(self))

    @contextmanager
    def dealt(self, batch: Batch, slot: Slot) -> Iterator[Batch]:
        """The batch with the images that this rank encodes in place of those that it shows, as long as this lasts."""
        if slot.encoders is None or not slot.has_images:
            yield batch
            return
        assert self.rule is not None, "a model without a tower is shown no images"
        self._ways = ways = ways_of(slot.images, slot.encoders, self.group.rank(), self.sharing)
        device = batch.tokens_T.device
        rows_P = rows_of(ways.sent, ways.own).to(device)

        def sent(x: Tensor) -> Tensor:
            return exchanged(x[rows_P], ways.patches_out, ways.patches_in, self.group)

        columns = 3 * self.rule.frames * self.rule.patch**2  # a batch without images has none
        sent_N = torch.tensor(ways.sent, dtype=torch.int64, device=device)
        try:
            yield replace(
                batch,
                patches_PC=sent(batch.patches_PC.reshape(-1, columns)),
                places_P2=sent(batch.places_P2),
                draws_P2=None if batch.draws_P2 is None else sent(batch.draws_P2),
                grids_N2=exchanged(batch.grids_N2[sent_N], ways.images_out, ways.images_in, self.group),
                cu_N1=torch.tensor([0, *ways.encoded], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device),
                longest_image=max(ways.encoded, default=0),
            )
        finally:
            self._ways = None

    def home(self, tokens_MD: Tensor) -> Tensor:
        """Visual tokens of the images that were encoded here -> of those that are shown here, in the order of the batch."""
        ways = self._ways
        if ways is None:
            return tokens_MD
        assert self.rule is not None
        merged = self.rule.merge**2
        by_pack, arriving = ([n // merged for n in patches] for patches in (ways.by_pack, ways.tokens_in))
        to_each = [pack for pack in range(len(by_pack)) for _ in range(self.sharing)]  # the pack of each rank
        if self.sharing > 1:  # every rank of a pack gets its tokens; their gradients are summed
            tokens_MD = tokens_MD[rows_of(to_each, by_pack).to(tokens_MD.device)]
        arrived_MD = exchange_rows(tokens_MD, [by_pack[pack] for pack in to_each], arriving, self.group)
        place = sorted(range(len(ways.order)), key=ways.order.__getitem__)  # of each image of the batch among those that arrive
        rows_M = rows_of(place, [ways.own[n] // merged for n in ways.order])
        return arrived_MD[rows_M.to(tokens_MD.device)]


class Home(nn.Module):
    """In the place of `deliver`."""

    def __init__(self, exchange: ImageExchange):
        super().__init__()
        self.exchange = exchange

    def forward(self, tokens_MD: Tensor) -> Tensor:
        return self.exchange.home(tokens_MD)
