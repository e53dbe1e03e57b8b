"""The images of a transformers engine's requests, which become placeholders of the prompt and patches of pixels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from pa_npu.engines.images import UNKNOWN_IMAGE, KeptImages, UnknownImage
from pa_npu.engines.transformers.image_passes import PromptImage
from pa_npu.engines.transformers.requests import CompletionRequest, EngineRequestRefused
from pa_npu.vision.images import BadImage
from pa_npu.vision.placeholders import expanded_at
from pa_npu.vision.processor import ImageProcessor


@dataclass(frozen=True, eq=False)
class ImageReader:
    """processor: of the model's directory. image_token: the model's placeholder. device: of patches.
    kept: images that were sent before.
    """

    processor: ImageProcessor
    image_token: int
    device: torch.device
    kept: KeptImages = field(default_factory=KeptImages)

    def expanded(
        self, prompt: Sequence[int], asked: CompletionRequest
    ) -> tuple[list[int], list[PromptImage]]:
        """Returns a request's prompt with all placeholders of its images, and the images.

        Decodes images, which takes time. Raises EngineRequestRefused.
        """
        places = [image.place for image in asked.images]
        num_prompt = len(prompt) - asked.vllm_xargs.drawn
        if sorted(set(places)) != places or not 0 <= places[0] <= places[-1] < num_prompt:
            raise EngineRequestRefused("images: their places must ascend within the prompt")
        if any(prompt[place] != self.image_token for place in places):
            raise EngineRequestRefused("images: at each place must be the model's placeholder")
        grids = []
        patches = []
        for image in asked.images:
            try:
                pixels = self.kept.pixels(image)
            except UnknownImage:
                raise EngineRequestRefused(f"{UNKNOWN_IMAGE} {image.key}; send its data") from None
            except BadImage as error:
                raise EngineRequestRefused(f"image {image.key:.40}: {error}") from None
            height, width = pixels.shape[:2]
            if self.processor.size_of(height, width) != (height, width):
                raise EngineRequestRefused(
                    f"image {image.key}: {width} x {height} pixels are not what the image "
                    "processor of this model's directory makes"
                )
            grids.append(self.processor.grid_of(height, width))
            patches.append(self.processor.patches(torch.from_numpy(pixels).to(self.device)))
        lengths = [self.processor.num_tokens(grid) for grid in grids]
        tokens, spans = expanded_at(prompt, places, lengths)
        images = [
            PromptImage(start, start + length, grid, array)
            for (start, length), grid, array in zip(spans, grids, patches, strict=True)
        ]
        return tokens, images
