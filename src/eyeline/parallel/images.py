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

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Ways(NamedTuple):
    """Where the images of a micro-batch go, as one rank sees it. What it shows is sent in the order of the ranks that encode it."""

    order: list[int]  # the images that are shown here, as they are sent
    own: list[int]  # patches of these, in the order of the batch
    images_out: list[int]  # to each rank
    images_in: list[int]  # from each rank
    patches_out: list[int]
    patches_in: list[int]
    encoded: list[int]  # patches of each image that is encoded here


def ways_of(patches: Sequence[Sequence[int]], encoders: Images, rank: int) -> Ways:
    ranks, own = range(len(patches)), list(patches[rank])
    there = [[[n for n, by in zip(patches[s], encoders[s], strict=True) if by == r] for r in ranks] for s in ranks]  # [from][to]
    out, arriving = there[rank], [there[s][rank] for s in ranks]
    return Ways(
        order=sorted(range(len(own)), key=lambda n: (encoders[rank][n], n)),
        own=own,
        images_out=[len(some) for some in out],
        images_in=[len(some) for some in arriving],
        patches_out=[sum(some) for some in out],
        patches_in=[sum(some) for some in arriving],
        encoded=[n for some in arriving for n in some],
    )


def rows_of(images: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """The rows of some images, in this order, where image n has `sizes[n]` rows and all are stored end to end."""
    ends = torch.tensor([0, *sizes]).cumsum(0).tolist()
    return torch.cat([torch.arange(ends[n], ends[n + 1]) for n in images] or [torch.empty(0, dtype=torch.int64)])


class ImageExchange:
    """The ranks that share out images. While a micro-batch runs, `deliver` sends its visual tokens home."""

    def __init__(self, group: "ProcessGroup"):
        self.group = group
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
        self._ways = ways = ways_of(slot.images, slot.encoders, self.group.rank())
        device = batch.tokens_T.device
        rows_P = rows_of(ways.order, ways.own).to(device)

        def sent(x: Tensor) -> Tensor:
            return exchanged(x[rows_P], ways.patches_out, ways.patches_in, self.group)

        columns = 3 * self.rule.frames * self.rule.patch**2  # a batch without images has none
        order_N = torch.tensor(ways.order, dtype=torch.int64, device=device)
        try:
            yield replace(
                batch,
                patches_PC=sent(batch.patches_PC.reshape(-1, columns)),
                places_P2=sent(batch.places_P2),
                draws_P2=None if batch.draws_P2 is None else sent(batch.draws_P2),
                grids_N2=exchanged(batch.grids_N2[order_N], ways.images_out, ways.images_in, self.group),
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
        arrived_MD = Exchanged.apply(tokens_MD, [n // merged for n in ways.patches_in], [n // merged for n in ways.patches_out], self.group)
        place = sorted(range(len(ways.order)), key=ways.order.__getitem__)  # of each image of the batch among those that arrive
        rows_M = rows_of(place, [ways.own[n] // merged for n in ways.order])
        return arrived_MD[rows_M.to(tokens_MD.device)]  # type: ignore[index]  # torch does not say what `apply` gives


class Home(nn.Module):
    """In the place of `deliver`."""

    def __init__(self, exchange: ImageExchange):
        super().__init__()
        self.exchange = exchange

    def forward(self, tokens_MD: Tensor) -> Tensor:
        return self.exchange.home(tokens_MD)


class Exchanged(torch.autograd.Function):
    """Rows sent to other ranks, and their gradients back."""

    @staticmethod
    def forward(ctx: Any, x_MD: Tensor, out: list[int], arriving: list[int], group: "ProcessGroup") -> Tensor:
        ctx.ways = out, arriving, group
        return exchanged(x_MD, out, arriving, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        out, arriving, group = ctx.ways
        return exchanged(gradients[0], arriving, out, group), None, None, None


def exchanged(x: Tensor, out: Sequence[int], arriving: Sequence[int], group: "ProcessGroup") -> Tensor:
    """The rows that other ranks send here, by rank; `out` rows go to each, and `arriving` come from each."""
    import torch.distributed as dist

    received = x.new_empty(sum(arriving), *x.shape[1:])
    dist.all_to_all_single(received, x.contiguous(), list(arriving), list(out), group=group)
    return received
