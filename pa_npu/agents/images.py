"""SessionImages: the images that the requests of a session show, from data URLs to placeholders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pa_npu.agents.chat import Chat
from pa_npu.agents.openai_format import AgentRequestRefused
from pa_npu.config.words import as_json
from pa_npu.data.image_rows import ImageInput
from pa_npu.errors import DataError
from pa_npu.vision.images import BadImage, ImageFile, ImageReader, ShownImage, from_data_url

ReadImage = tuple[ImageFile, ImageReader]


class SessionImages:
    """The images of one session, whose bytes are kept as long as the session is."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self._reader = None if isinstance(chat.images, str) else chat.images.reader.apart()
        self._usable: set[bytes] = set()

    @property
    def are_read(self) -> bool:
        return self._reader is not None

    def read(self, values: Sequence[Any]) -> list[ReadImage]:
        """Returns the images that parts of messages hold: data URLs, or images of a prompt.

        Decodes each image once, which takes time. Raises RequestRefused.
        """
        return [self._read(number, value) for number, value in enumerate(values, start=1)]

    def _read(self, number: int, value: Any) -> ReadImage:
        if isinstance(value, ShownImage):
            return value.file, value.reader
        assert self._reader is not None, "messages of a model without images have none"
        try:
            if not isinstance(value, str) or not value.startswith("data:"):
                raise BadImage(
                    f"{as_json(value)} is no data URL, and nothing is fetched here; send "
                    "data:image/png;base64,..."
                )
            file = self._reader.read_bytes(from_data_url(value))
            if file.digest not in self._usable:
                self._reader.pixels(file)
                self._usable.add(file.digest)
        except (BadImage, DataError) as error:
            raise AgentRequestRefused(
                f"messages: image {number}: {error}", param="messages", code="invalid_image"
            ) from None
        return file, self._reader

    def expanded(
        self, text: str, tokens: Sequence[int], places: Sequence[int], images: Sequence[ReadImage]
    ) -> tuple[list[int], tuple[ShownImage, ...]]:
        """Returns the tokens of a text with all placeholders of its images, and the images.

        places: of the images' placeholders in the text. Raises RequestRefused.
        """
        if not images:
            return list(tokens), ()
        assert isinstance(self._chat.images, ImageInput), "it has read images"
        processor = self._chat.images.reader.processor
        grids = [processor.grid_of(file.height, file.width) for file, _ in images]
        lengths = [processor.num_tokens(grid) for grid in grids]
        whole, spans = self._chat.expanded(text, tokens, places, lengths)
        shown = [
            ShownImage(*span, grid=grid, file=file, reader=reader)
            for span, grid, (file, reader) in zip(spans, grids, images, strict=True)
        ]
        return whole, tuple(shown)
