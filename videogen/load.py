"""From a model source to a pipeline whose every component is present and strictly complete; renders nothing."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from diffusers import ConfigMixin, ModelMixin
from diffusers.utils import logging as diffusers_logging
from torch.nn.modules.module import register_module_module_registration_hook
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from videogen.errors import EnvironmentFault, say
from videogen.families.h3_pipeline import H3Pipeline
from videogen.families.wan_parts import WanParts
from videogen.parallel.weights import WHOLE, Placement
from videogen.source import ModelSource
from videogen.stored import remember

logger = logging.getLogger(__name__)

RANDOM_SEED = 0
_SHOWN = 5


def pick_device(name: str) -> torch.device:
    """`auto` is the first CUDA device, else the CPU.

    Raises EnvironmentFault when the device asked for is not there.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    there = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not there[name]:
        raise EnvironmentFault(say("device", repr(name), "a device this torch can use", "use --device cpu, or check the driver"))
    return torch.device(name)


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is float32 on the CPU (exact, and fast enough at pocket size) and bfloat16 elsewhere."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]


@contextmanager
def _quiet() -> Iterator[None]:
    """Hold back the libraries' own bars and deprecation notes while loading: our screen reports, and faults raise."""
    before = [(module, module.is_progress_bar_enabled()) for module in (diffusers_logging, transformers_logging)]
    for module, _ in before:
        module.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        for module, was_enabled in before:
            if was_enabled:
                module.enable_progress_bar()


def _fault(what: str, got: object, expected: str) -> EnvironmentFault:
    return EnvironmentFault(say(what, str(got), expected, "download the model again, or check the folder"))


def _check_complete(name: str, info: dict[str, Any]) -> None:
    """Refuse a model whose files and parameters do not match one to one."""
    for kind, word in (("missing_keys", "missing"), ("unexpected_keys", "left over"), ("mismatched_keys", "of another shape")):
        keys = [str(key[0]) if isinstance(key, tuple | list) else str(key) for key in info.get(kind) or ()]
        if keys:
            shown = ", ".join(sorted(keys)[:_SHOWN]) + (" ..." if len(keys) > _SHOWN else "")
            raise _fault(f"weights of {name}", f"{len(keys)} tensors {word} ({shown})", "every tensor exactly once")


def _is_finite(model: torch.nn.Module) -> bool:
    """By the extremes, which a NaN makes NaN: one pass, on a CPU twelve times as fast as asking every weight."""
    return all(bool(torch.isfinite(torch.stack(torch.aminmax(p))).all()) for p in model.parameters() if p.is_floating_point() and p.numel())


def _load_model(kind: Any, name: str, folder: Path, subfolder: str, dtype: torch.dtype) -> Any:
    if not (folder / subfolder / "config.json").is_file():
        raise _fault(f"model component {name}", f"no {subfolder}/config.json in {folder}", "every component of the index")
    try:
        model, info = kind.from_pretrained(folder, subfolder=subfolder, dtype=dtype, output_loading_info=True, local_files_only=True)
    except (OSError, RuntimeError, ValueError, KeyError, TypeError) as error:
        first = str(error).strip().split("\n")[0][:300]
        raise _fault(f"model component {name}", f"{type(error).__name__}: {first}", "files that load") from error
    _check_complete(name, info)
    remember(model, folder / subfolder)
    return model


def _cast(model: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """Cast parameters and buffers, keeping in float32 the parts the class asks for (matched by exact path part).

    Transformers keeps some of them for float16 only.
    """
    always = "_keep_in_fp32_modules_strict" if isinstance(model, PreTrainedModel) and dtype != torch.float16 else "_keep_in_fp32_modules"
    kept = set(getattr(model, always, None) or ())
    for path, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(torch.float32 if kept & set(path.split(".")) else dtype)
    return model


@contextmanager
def _building(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Make parameters in `dtype` straight on the device, from a fixed seed; random state and defaults are put back."""
    before = torch.get_default_dtype()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        torch.manual_seed(RANDOM_SEED)
        torch.set_default_dtype(dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


@contextmanager
def _sent_home() -> Iterator[None]:
    """What is built on a device inside the scope goes to host memory part by part: drawn as if it stayed, and never all there."""
    handle = register_module_module_registration_hook(lambda _owner, _name, part: part.to("cpu") if part is not None else None)
    try:
        yield
    finally:
        handle.remove()


def _random_model(kind: Any, folder: Path, subfolder: str, device: torch.device, dtype: torch.dtype, *, is_hosted: bool) -> Any:
    """A model built from its config with seeded weights, the same wherever they are to live: drawn on the device, where that is quick.

    33 B parameters never exist in float32.
    """
    if issubclass(kind, ModelMixin):
        with _building(device, dtype), _sent_home() if is_hosted else nullcontext():
            model = kind.from_config(kind.load_config(folder, subfolder=subfolder))
    else:  # transformers draws all weights at the end, where they all are
        config = kind.config_class.from_pretrained(folder, subfolder=subfolder)
        try:
            with _building(device, dtype):
                model = kind(config)
        except torch.OutOfMemoryError:
            if not is_hosted:
                raise
            logger.warning("%s: the device has no room to draw it; drawn in host memory, with other random weights", kind.__name__)
            with _building(torch.device("cpu"), dtype):
                model = kind(config)
    return _cast(model.to("cpu") if is_hosted else model, dtype).eval()


def _load_component(source: ModelSource, name: str, spec: Any, device: torch.device, dtype: torch.dtype, *, is_hosted: bool = False) -> Any:
    kind, subfolder = spec.type_hint, spec.subfolder or ""
    if isinstance(kind, type) and issubclass(kind, ModelMixin | PreTrainedModel):
        if source.weights == "random":
            return _random_model(kind, source.folder, subfolder, device, dtype, is_hosted=is_hosted)
        return _load_model(kind, name, source.folder, subfolder, dtype)
    try:
        if isinstance(kind, type) and issubclass(kind, ConfigMixin):
            return kind.from_pretrained(source.folder, subfolder=subfolder, local_files_only=True)  # type: ignore[attr-defined]
        return kind.from_pretrained(str(source.folder / subfolder), local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        first = str(error).strip().split("\n")[0][:300]
        raise _fault(f"model component {name}", f"{type(error).__name__}: {first}", "files that load") from error


def _blueprint(source: ModelSource, workflow: str) -> Any:
    """A pipeline of the model's family that has no components yet, with their specs."""
    return WanParts(source.folder, workflow) if source.is_wan else H3Pipeline.from_pretrained(str(source.folder), workflow=workflow)


def outline(source: ModelSource, workflow: str, dtype: torch.dtype) -> dict[str, torch.nn.Module]:
    """A workflow's models by name, with their structure and sizes and without memory."""
    pipe, found = _blueprint(source, workflow), dict[str, torch.nn.Module]()
    with _quiet():
        for name, spec in pipe._component_specs.items():
            if isinstance(spec.type_hint, type) and issubclass(spec.type_hint, ModelMixin | PreTrainedModel):
                own_dtype = torch.float32 if name in getattr(pipe, "float32_parts", ()) else dtype
                told = (spec.type_hint, source.folder, spec.subfolder or "", torch.device("meta"), own_dtype)
                found[name] = _random_model(*told, is_hosted=False)
    return found


def load_component(source: ModelSource, workflow: str, name: str, *, device: torch.device, dtype: torch.dtype) -> Any:
    """One component of a workflow alone, on the device: to time a part of a model that fits only in part."""
    spec = _blueprint(source, workflow)._component_specs[name]
    with _quiet():
        component = _load_component(source, name, spec, device, dtype)
    return component.to(device) if isinstance(component, torch.nn.Module) else component


def load_pipeline(
    source: ModelSource,
    workflow: str,
    *,
    device: torch.device,
    dtype: torch.dtype,
    shared: dict[str, Any],
    placement: Placement = WHOLE,
) -> Any:
    """A diffusers pipeline for one workflow (`t2va`, `fl2va`, `ref2va`; `t2v`, `i2v`) with every component loaded.

    `shared` holds components by subfolder, so that workflows and partitions stored once are in memory once; `placement` says
    where their weights live.
    Raises EnvironmentFault naming up to five keys when a component is missing, incomplete or broken.
    """
    pipe = _blueprint(source, workflow)
    float32_parts = getattr(pipe, "float32_parts", ())
    loaded: dict[str, Any] = {}
    for name, spec in pipe._component_specs.items():
        if spec.default_creation_method != "from_pretrained" or placement.is_elsewhere(name):
            continue
        key = f"{spec.type_hint.__name__}:{spec.subfolder or name}"
        if key not in shared:
            logger.info("loading %s", name)
            is_hosted = placement.is_hosted(name)
            with _quiet():
                own_dtype = torch.float32 if name in float32_parts else dtype
                component = _load_component(source, name, spec, device, own_dtype, is_hosted=is_hosted)
            if isinstance(component, torch.nn.Module):
                component = component if is_hosted else component.to(device)
                if not _is_finite(component):
                    raise _fault(f"weights of {name}", "NaN or infinity", "finite numbers")
                component = placement.place(name, component, device)
            shared[key] = component
        loaded[name] = shared[key]
    pipe.register_components(**loaded)
    missing = [name for name in pipe._component_specs if getattr(pipe, name, None) is None and not placement.is_elsewhere(name)]
    if missing:
        raise _fault("model components", ", ".join(missing[:_SHOWN]), "every component loaded")
    return pipe
