"""A transformers model that reads images, over a packed row: each image once, behind the placeholders that stand for it.

    tokens ──embeddings──────────────┐
    images ──tower──> features ──────┴─> rows of placeholders ──decoder, positions on three axes──> states

transformers' own forward finds placeholders by their id, so that one which the policy wrote would
be taken for an image. Here rows say it. A frozen tower computes without a graph.

Microbatches with and without images may stand beside each other on the ranks: a tower whose weights
are trained computes a smallest image, which nothing sees, where a microbatch has none. So every
weight has a gradient on every rank, if only zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from pa_npu.attention import PrefixLayout
from pa_npu.samples.microbatch import Microbatch
from pa_npu.vision.family import TOWER
from pa_npu.vision.images import PIXELS
from pa_npu.vision.positions import ImageRows, image_positions
from pa_npu.vision.processor import ImageProcessor


@dataclass(frozen=True, eq=False)
class PackedImages:
    """The images of a packed row of T tokens.

    positions: int64 [4, T], see image_positions.
    patches: float32 [patches, size] of all images, each once. grids: int64 [images, 3].
    rows: int64 [R], ascending, the rows that are placeholders. features: int64 [R], which of the
    images' features, counted over all of them, belongs to each row.
    """

    positions: torch.Tensor
    patches: torch.Tensor | None = None
    grids: torch.Tensor | None = None
    rows: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    features: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))


@dataclass(frozen=True, eq=False)
class ShownPatches:
    """An image and where a packed row shows it.

    grid: its patches along time, height and width. patches: as in PackedImages.
    rows, places: int64 [R], see PackedAttachments.
    """

    grid: tuple[int, int, int]
    patches: torch.Tensor
    rows: torch.Tensor
    places: torch.Tensor


def pack_images(
    microbatch: Microbatch, processor: ImageProcessor, *, fill: bool = False
) -> PackedImages:
    """Returns the images of a microbatch, on the device of its tokens.

    fill: where there are none, a smallest image that no row shows.
    """
    shown = []
    for packed in microbatch.attachments:
        if PIXELS not in packed.arrays:
            continue
        pixels = packed.arrays[PIXELS]
        grid = processor.grid_of(*pixels.shape[:2])
        if processor.num_tokens(grid) != packed.length:
            raise ValueError(
                f"an image of {processor.num_tokens(grid)} tokens for {packed.length} "
                "placeholders; coordinator and trainers must read the same image processor"
            )
        shown.append(ShownPatches(grid, processor.patches(pixels), packed.rows, packed.places))
    device = microbatch.tokens.device
    if shown:
        return joined_images(microbatch.whole_layout, shown, processor.merged, device)
    positions = image_positions(microbatch.whole_layout, ()).to(device)
    return smallest_image(positions, processor) if fill else PackedImages(positions)


def joined_images(
    layout: PrefixLayout, shown: Sequence[ShownPatches], merged: int, device: torch.device
) -> PackedImages:
    """Returns at least one image as a model takes them. merged: patches of a side that become one
    token.
    """
    places: list[ImageRows] = []
    features = []
    num_features = 0
    for image in shown:
        height, width = image.grid[1] // merged, image.grid[2] // merged
        starts = image.rows[image.places == 0].tolist()
        places += [ImageRows(start, height, width) for start in starts]
        features.append(image.places + num_features)
        num_features += height * width
    rows = torch.cat([image.rows for image in shown])
    order = rows.argsort()
    return PackedImages(
        positions=image_positions(layout, places).to(device),
        patches=torch.cat([image.patches for image in shown]),
        grids=torch.tensor([image.grid for image in shown], device=device),
        rows=rows[order],
        features=torch.cat(features)[order],
    )


def text_only(layout: PrefixLayout, device: torch.device) -> PackedImages:
    """Returns what a row without images is given."""
    return PackedImages(image_positions(layout, ()).to(device))


def smallest_image(positions: torch.Tensor, processor: ImageProcessor) -> PackedImages:
    """Returns an image of one token that no row shows."""
    side = processor.token_pixels
    pixels = torch.zeros(side, side, 3, dtype=torch.uint8, device=positions.device)
    grid = torch.tensor([[1, processor.merged, processor.merged]], device=positions.device)
    return PackedImages(positions, patches=processor.patches(pixels), grids=grid)


def image_states(
    causal: Any, tokens: torch.Tensor, images: PackedImages, known: dict[str, Any]
) -> Any:
    """Returns the decoder's output over a row of tokens, int64 [T]. known: further arguments of its
    attention.
    """
    base = causal.base_model
    embeddings = causal.get_input_embeddings()(tokens[None])
    deepstack: dict[str, Any] = {}
    if images.patches is not None:
        is_trained = torch.is_grad_enabled() and any(
            parameter.requires_grad for parameter in getattr(base, TOWER).parameters()
        )
        with nullcontext() if is_trained else torch.no_grad():
            output = base.get_image_features(images.patches, images.grids, return_dict=True)
        levels = [output.pooler_output, *(getattr(output, "deepstack_features", None) or ())]
        features = [torch.cat(list(level)).to(embeddings.dtype) for level in levels]
        if len(images.rows):
            of_rows = [level.index_select(0, images.features) for level in features]
            embeddings = embeddings.index_copy(1, images.rows, of_rows[0][None])
            if len(of_rows) > 1:
                mask = torch.zeros(tokens.shape, dtype=torch.bool, device=tokens.device)
                mask[images.rows] = True
                deepstack["visual_pos_masks"] = mask[None]
                deepstack["deepstack_visual_embeds"] = of_rows[1:]
        else:  # an image that nothing sees
            embeddings = embeddings + sum(level.sum() for level in features) * 0.0
    return base.language_model(
        inputs_embeds=embeddings,
        position_ids=images.positions[:, None],
        use_cache=False,
        **deepstack,
        **known,
    )


def set_attention(causal: Any, name: str) -> None:
    """Lets a model's decoder attend by the implementation of this name, and a tower by its own: an
    image's patches attend both ways, and know no layout.
    """
    if hasattr(causal.base_model, TOWER):
        causal.set_attn_implementation({"text_config": name, "vision_config": "sdpa"})
    else:
        causal.set_attn_implementation(name)


def freeze_tower(causal: Any) -> None:
    tower = getattr(causal.base_model, TOWER, None)
    if tower is not None:
        tower.requires_grad_(False)
