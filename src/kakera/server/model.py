"""ServedModel: everything the server knows about the model it offers, read once at start."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from kakera.arch.documents import read_object
from kakera.arch.preprocessor import read_pixels
from kakera.arch.registry import load_spec
from kakera.arch.vision import VisionSpec
from kakera.chat.template import ChatTemplate
from kakera.constrain.compiler import Compiler
from kakera.errors import CheckpointError
from kakera.hub.disk import source_of
from kakera.hub.names import Source
from kakera.text.tokenizer import Tokenizer
from kakera.vision.fetch import Fetcher
from kakera.vision.reader import ImageReader


@dataclass(frozen=True)
class SamplingDefaults:
    """What generation_config.json recommends; a request's own values win."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @staticmethod
    def load(directory: Path) -> SamplingDefaults:
        """Raises CheckpointError for values that are no numbers."""
        path = directory / "generation_config.json"
        config = read_object(path)
        fields = SamplingDefaults.__dataclass_fields__.values()
        values: dict[str, Any] = {f.name: config[f.name] for f in fields if config.get(f.name) is not None}
        for name, value in values.items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise CheckpointError(f"{path}: {name} is {value!r}, which is not a number")
        if config.get("do_sample") is False:
            values["temperature"] = 0.0
        return SamplingDefaults(**values)


@dataclass(frozen=True)
class ServedModel:
    """`vocab` is the width of the logits, `eos` the tokens that end an answer. Answers carry `name`, whichever of
    `aliases`, or with `any_name` whatever name, a request had. `source`: where on the hub it comes from. `images` reads
    them, where the engine has a tower and the template a place for them."""

    name: str
    tokenizer: Tokenizer
    template: ChatTemplate | None
    vocab: int
    eos: tuple[int, ...]
    defaults: SamplingDefaults = SamplingDefaults()
    aliases: tuple[str, ...] = ()
    any_name: bool = False
    source: Source | None = None
    images: ImageReader | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    @cached_property
    def compiler(self) -> Compiler:
        """Checks grammars before requests are queued; the engine has its own."""
        return Compiler(lambda: self.tokenizer, self.vocab, self.eos)

    @staticmethod
    def load(directory: Path, name: str, tokenizer: Tokenizer | None = None) -> ServedModel:
        """`tokenizer` is the directory's if it has been loaded. Raises CheckpointError naming the file that is missing
        or broken."""
        spec = load_spec(directory)
        tokenizer = tokenizer or Tokenizer.load(directory)
        template = ChatTemplate.load(directory, tokenizer, spec.eos)
        defaults, source = SamplingDefaults.load(directory), source_of(directory)
        return ServedModel(name, tokenizer, template, spec.vocab, spec.eos, defaults, source=source)

    def seeing(self, vision: VisionSpec, tower: Path, tokens: int, fetcher: Fetcher | None = None) -> ServedModel:
        """The same model over an engine that reads images of up to so many tokens, if its template has a place for
        them. `tower`: the directory that holds it; `fetcher`: of images that are named. Raises CheckpointError for a
        preprocessing that is not computed."""
        template = None if self.template is None else self.template.with_images(vision.token)
        if template is None or not template.shows_images:
            return self
        return replace(self, template=template, images=ImageReader(read_pixels(tower, vision), tokens, fetcher=fetcher))

    @property
    def sees(self) -> bool:
        return self.images is not None

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)

    def answers_to(self, name: str | None) -> bool:
        """Clients without a choice of models leave the name out or say "default"."""
        return self.any_name or name in (None, "default", *self.names)
