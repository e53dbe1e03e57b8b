"""ImageInput: images of a dataset's rows as one model reads them, and the placeholders that stand for them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pa_npu.config.schema import Config
from pa_npu.data.records import Record
from pa_npu.errors import DataError
from pa_npu.vision.family import VisionModel, read_vision, why_not
from pa_npu.vision.images import BadImage, ImageFile, ImageReader, ShownImage
from pa_npu.vision.memory import give_back_large_arrays
from pa_npu.vision.placeholders import expanded
from pa_npu.vision.processor import ImageProcessor

DECODE_LIMIT_S = 60.0
"""Images are decoded before a run, to find broken ones, as long as all of them take less; of the
rest only the headers are read. An image of a megapixel takes 10 to 20 ms.
"""


@dataclass(eq=False, repr=False)
class ImageInput:
    """The way in which a run's model reads images. column: data.images_column."""

    model: VisionModel
    reader: ImageReader
    column: str
    _decode_s: float = field(default=DECODE_LIMIT_S, init=False)

    @classmethod
    def from_config(cls, config: Config) -> ImageInput | str:
        """Returns how the run's model reads images, or why it does not.

        Raises DataError if the model's files do not go together.
        """
        if config.data.images_column is None:
            return "data.images_column is null"
        model = read_vision(config.model.path)
        if model is None:
            return why_not(config.model.path)
        if config.trainer.backend != "fsdp":
            return f"trainer.backend={config.trainer.backend} trains text alone"
        bound = config.data.max_image_pixels
        processor = ImageProcessor.from_directory(config.model.path, bound)
        give_back_large_arrays()
        if processor.merged != model.merged:
            raise DataError(
                f"model.path: {config.model.path}: merge_size {processor.merged} of its image "
                f"processor is not spatial_merge_size {model.merged} of its config.json; restore "
                "both from the model's source"
            )
        return cls(model, ImageReader(processor), config.data.images_column)

    def taken(self, record: Record, path: str) -> Record:
        """Returns the record with its images as files, and names of these in its row: from here on
        nobody holds their bytes.

        path: of the dataset. Raises DataError.
        """
        if not record.images:
            return record
        directory = Path(path) if Path(path).is_dir() else Path(path).parent
        files = tuple(self._read(record, value, directory) for value in record.images)
        row = dict(record.row)
        if self.column in row:
            row[self.column] = [file.label for file in files]
        return replace(record, images=files, row=row)

    def _read(self, record: Record, value: Any, directory: Path) -> ImageFile:
        began_s = time.thread_time()
        try:
            file = self.reader.read(value, directory)
            if self._decode_s > 0:
                self.reader.check(file)
        except BadImage as error:
            raise DataError(f"{record.location}: image: {error}") from None
        finally:
            self._decode_s -= time.thread_time() - began_s
        return file

    def shown(
        self, record: Record, tokens: Sequence[int]
    ) -> tuple[list[int], tuple[ShownImage, ...]]:
        """Returns the prompt's tokens with all placeholders of its images, and the images.

        record: as `taken` returned it. tokens: of the rendered prompt, with one placeholder an
        image. Raises DataError.
        """
        files: tuple[ImageFile, ...] = record.images
        processor = self.reader.processor
        grids = [processor.grid_of(file.height, file.width) for file in files]
        lengths = [processor.num_tokens(grid) for grid in grids]
        try:
            expanded_tokens, spans = expanded(tokens, self.model.image_token, lengths)
        except ValueError as error:
            raise DataError(
                f"{record.location}: the rendered prompt has {error}; the chat template leaves an "
                "image out, or a text holds the placeholder itself: correct the row"
            ) from None
        images = [
            ShownImage(*span, grid=grid, file=file, reader=self.reader)
            for span, grid, file in zip(spans, grids, files, strict=True)
        ]
        return expanded_tokens, tuple(images)
