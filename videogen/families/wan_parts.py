"""A Wan folder's components as `load` fills them in, and the diffusers pipeline they become; renders nothing."""

from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from diffusers import WanImageToVideoPipeline, WanPipeline
from diffusers.modular_pipelines.modular_pipeline_utils import ComponentSpec

from videogen.errors import EnvironmentFault, say
from videogen.families.base import read_json
from videogen.families.wan import I2V, INDEX, has_component

_SETTINGS = ("boundary_ratio", "expand_timesteps")
_UNUSED_BY_TEXT = ("image_encoder", "image_processor")


class _OnVae:
    """The device of a request is where the VAE is: other components may live in host memory and visit."""

    vae: Any

    @property
    def _execution_device(self) -> torch.device:
        parameter: torch.nn.Parameter = next(self.vae.parameters())
        return parameter.device


class TextPipeline(_OnVae, WanPipeline):  # type: ignore[misc]
    """Diffusers' text-to-video pipeline."""


class ImagePipeline(_OnVae, WanImageToVideoPipeline):  # type: ignore[misc]
    """Diffusers' image-to-video pipeline; it encodes text as the other does, which works without ftfy too (its own would crash)."""

    _get_t5_prompt_embeds = WanPipeline._get_t5_prompt_embeds


class WanParts:
    """The components of one workflow; `pipe` is diffusers' pipeline once they are registered.

    The VAE and the image encoder stay in float32, as their makers ask for.
    """

    float32_parts = frozenset({"vae", "image_encoder"})

    def __init__(self, folder: Path, workflow: str) -> None:
        index = read_json(folder, INDEX)
        self.kind = ImagePipeline if workflow == I2V else TextPipeline
        self.settings = {name: index[name] for name in _SETTINGS if index.get(name) is not None}
        names = [name for name in index if has_component(index, name)]
        wanted = names if workflow == I2V else [name for name in names if name not in _UNUSED_BY_TEXT]
        self._component_specs = {name: _spec(name, *index[name]) for name in wanted}
        self.pipe: Any = None

    def register_components(self, **loaded: Any) -> None:
        """Make diffusers' pipeline of the loaded components; only the first rank of a clip has a text encoder."""
        loaded = {"text_encoder": None} | loaded
        self.pipe = self.kind(**loaded, **self.settings)
        self.__dict__.update(loaded)

    @property
    def transformers(self) -> tuple[Any, ...]:
        """The experts, high noise first."""
        found = (self.pipe.transformer, self.pipe.transformer_2)
        return tuple(each for each in found if each is not None)


def _spec(name: str, library: str, class_name: str) -> ComponentSpec:
    home = {"diffusers": diffusers, "transformers": transformers}.get(library)
    kind = getattr(home, class_name, None)
    if kind is None:
        message = say(f"model component {name}", f"{library}.{class_name}", "a class of diffusers or transformers", "update them")
        raise EnvironmentFault(message)
    return ComponentSpec(name=name, type_hint=kind, subfolder=name, default_creation_method="from_pretrained")
