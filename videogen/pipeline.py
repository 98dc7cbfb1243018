"""The composition root: opens a model with a recipe and renders requests; the only place that attaches things."""

import logging
from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import numpy as np
import torch

from caches.certificate import Fingerprint
from lora.apply import attached_to
from videogen.adapters import Shelf, adapters_record, put_on, put_on_wan, settle
from videogen.certificates import certified, fingerprint
from videogen.config import Recipe, Request, as_plain, read_environment, recipe_record
from videogen.device_profile import DeviceProfile, read_profile
from videogen.errors import bad
from videogen.families import h3_pipeline, wan_pipeline
from videogen.families.base import Resolved, check_unchanged
from videogen.families.limits import check_limits
from videogen.families.wan import WanResolved
from videogen.families.wan_parts import WanParts
from videogen.fit import fitted
from videogen.identity import hash_bytes
from videogen.images import picture_of
from videogen.load import load_pipeline, pick_device, pick_dtype
from videogen.machine import hardware, peak_memory_mb, software
from videogen.media import to_uint8
from videogen.memory import collect, once_more
from videogen.parallel.sharding import ALONE, Sharding
from videogen.parallel.weights import AUTO, WHOLE, Placement
from videogen.priors import uncertified_prior
from videogen.progress import OnEvent, PhaseClock, StopFlag, ignore
from videogen.recipes import find_recipe
from videogen.result import RawClip, Result
from videogen.seeds import draw_seed
from videogen.source import ModelSource, check_digest, fetch_weights, find_model, open_family
from videogen.text.expand import Expanded, Expander
from videogen.text.film import FilmForm
from videogen.text.grammar import GrammarForm
from videogen.text.model import TextModel
from videogen.timing import synchronizer
from videogen.transforms.adaln import place_projections
from videogen.transforms.attach import Kept, Transforms
from videogen.transforms.settle import arithmetic, settled

logger = logging.getLogger(__name__)

SCHEMA = "videogen.clip/1"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


class Pipeline:
    """A model opened with a recipe. Workflows load on first use and stay; requests share nothing but weights."""

    def __init__(
        self,
        source: ModelSource,
        family: Any,
        recipe: Recipe,
        device: torch.device,
        profile: DeviceProfile | None = None,
        sharding: Sharding = ALONE,
        placement: Placement = WHOLE,
    ) -> None:
        self.source, self.family, self.recipe, self.device = source, family, recipe, device
        self.profile, self.sharding, self.placement = profile, sharding, placement
        check_limits(source, family, recipe, placement.kind)
        self.dtype = pick_dtype(recipe.dtype, device)
        self.strata = [each.fingerprint.dtype for each in recipe.cache.certificates]
        self._asked = recipe.savings
        if placement.kind != "whole":  # they were loaded into host memory, and can stay there
            self._asked = replace(recipe.savings, park_adaln=recipe.savings.adaln_tables)
        self.savings, _ = settled(self._asked, device, self.dtype, self.strata, profile)
        self._shared: dict[str, Any] = {}
        self._opened: dict[str, Any] = {}
        self._shelf = Shelf(source)
        self._kept = Kept()
        self._expander = Expander(GrammarForm() if source.is_pocket else FilmForm(has_sound=not source.is_wan), device, self.dtype)

    def sharing(self, recipe: Recipe, sharding: Sharding | None = None) -> "Pipeline":
        """Another recipe over the same weights, or other ranks that share a clip; nothing is loaded twice."""
        wanted = settle(recipe, self.source)
        other = Pipeline(self.source, self.family, wanted, self.device, self.profile, sharding or self.sharding, self.placement)
        if other.dtype != self.dtype:
            raise bad("dtype", recipe.dtype, f"the weights' own, {self.dtype}", "open a pipeline of its own")
        other._shared, other._opened, other._shelf, other._kept = self._shared, self._opened, self._shelf, self._kept
        other._expander = self._expander
        return other

    def let_go(self) -> None:
        """Forget the weights and all that is kept beside them, for every pipeline that shares them: the next clip loads them anew."""
        for kept in (self._opened, self._shared, self._expander._writers):
            kept.clear()
        self._kept.clear()
        collect()

    def _smaller(self) -> "Pipeline":
        """The same clips in less memory, bit for bit where weights still lie on a device, whole or one expert of two: they come block
        by block from host memory then.

        Where they do already, the decoder takes one tile a call (Wan's has none). Nothing is kept for later requests.
        """
        scaled = "whole" if self.source.is_wan else "parked"  # float8 products keep weights of their own on the device
        kind = scaled if self.savings.matmul == "float8" else "offload"
        placement, more = Placement(kind, None, "offload"), dict[str, Any](encodings=0)
        if self.device.type == "cpu":  # all of it is host memory, and what visits would be there twice
            placement, more = WHOLE, more | {"adaln_tables": False}
        elif self.placement.kind == kind and self.placement.text != "resident":
            more |= {"decode_batch": min(1, self.savings.decode_batch)}
        other = Pipeline(self.source, self.family, self.recipe, self.device, self.profile, self.sharding, placement)
        other.savings, other._expander = replace(other.savings, **more), self._expander
        other._opened, other._shared, other._kept = self._opened, self._shared, self._kept
        return other

    def load(self, workflow: str) -> Any:
        """Diffusers' pipeline for a workflow, loaded once, with the adapters of this recipe and no others on its transformer.

        They stay until a pipeline that shares the weights asks for others, so that equal clips in a row pay once.
        """
        if workflow not in self._opened:
            self._opened[workflow] = load_pipeline(
                self.source, workflow, device=self.device, dtype=self.dtype, shared=self._shared, placement=self.placement
            )
        pipe = self._opened[workflow]
        if isinstance(pipe, WanParts):
            put_on_wan(pipe, self.recipe.adapters, self._shelf)
            return pipe
        put_on(denoisers(pipe)[0], self.recipe.adapters, self._shelf)
        if not self.savings.park_adaln:  # another recipe may have parked them
            place_projections(denoisers(pipe)[0], self.device)
        return pipe

    def render(
        self,
        request: Request | Resolved,
        *,
        seed: int | None = None,
        on_event: OnEvent = ignore,
        stop: StopFlag | None = None,
    ) -> Result:
        """Render one clip. The seed is the request's, else `seed`, else drawn; it is in the record either way.

        What runs out of memory is rendered once more in less of it. Raises RequestError before any weight loads,
        EnvironmentFault when the model cannot load, CancelledRender when `stop` is set, DoesNotFit.
        """
        resolved = request if isinstance(request, Resolved) else self.family.resolve(request, self.recipe)
        if resolved.adapters != self.recipe.adapters.identity:
            raise bad("request", "settled for other adapters", f"those of {self.recipe.name}", "settle it with this pipeline's recipe")
        check_unchanged(resolved.inputs)
        used_seed = self.sharding.same(next(s for s in (resolved.seed, seed, draw_seed()) if s is not None))
        what = f"clip {resolved.width}x{resolved.height}, {resolved.frames} frames"
        again = None  # ranks that share a clip could only try again together
        if self.sharding is ALONE:
            again = lambda: self._smaller()._render(resolved, used_seed, on_event, stop)  # noqa: E731
        return once_more(what, lambda: self._render(resolved, used_seed, on_event, stop), self.let_go, again)

    def _render(self, resolved: Resolved, used_seed: int, on_event: OnEvent, stop: StopFlag | None) -> Result:
        stratum = self.stratum(resolved)
        cache, note = certified(self.recipe.cache, stratum)
        if (prior := uncertified_prior(cache)) is not None:
            prior.check(resolved)
            note = note or prior.told(stratum)
        if note:
            logger.warning("%s", note)
        started, clock = _now(), PhaseClock(on_event, self.sharding.stop(stop or StopFlag()), synchronizer(self.device))
        expanded = self._expand(resolved, used_seed, clock)
        resolved = resolved if expanded is None else replace(resolved, prompt=expanded.text)
        clock.enter("load")
        pipe = self.load(resolved.workflow)
        transforms = self.transforms_for(resolved)
        run = wan_pipeline.run if isinstance(pipe, WanParts) else h3_pipeline.run
        raw = run(pipe, resolved, used_seed, clock, cache, transforms, self.recipe.sparse, self.sharding)
        if raw.cache.warning:
            logger.warning("%s", raw.cache.warning)
        if self.recipe.sparse.is_on and raw.attention["reason"]:
            logger.warning("sparse attention: dense, %s", raw.attention["reason"])
        frames = to_uint8(raw.frames)
        record = self._record(resolved, used_seed, raw, clock.stages_s) | {"started": started, "finished": _now()}
        if len(clock.steps_s) == len(record["cache"]["steps"]):  # Wan's guided steps are two decisions each
            record["cache"]["steps"] = [step | {"ms": round(1e3 * s, 2)} for step, s in zip(record["cache"]["steps"], clock.steps_s)]
        record["cache"] |= {"certificate": cache.certificates[0].promise if cache.certificates and cache.lam else None, "note": note}
        record["savings"] = transforms.told
        record["expansion"] = None if expanded is None else expanded.record()
        record["adapters"] = adapters_record(self.recipe.adapters, [attached_to(each) for each in denoisers(pipe)])
        audio = None if raw.audio is None else np.clip(raw.audio, -1.0, 1.0)
        sound = None if raw.audio is None else hash_bytes(raw.audio.tobytes())
        record["output"] = {"frames_sha256": hash_bytes(np.ascontiguousarray(frames).data), "audio_sha256": sound}
        return Result(frames, audio, raw.sampling_rate, resolved.fps, record)

    def _expand(self, resolved: Resolved, seed: int, clock: PhaseClock) -> Expanded | None:
        """The prompt completed by the text model that the request names, if any."""
        if resolved.expand is None:
            return None
        if resolved.expand.kind == "remote" and self.sharding is not ALONE:
            advice = "use another source, or one device a clip"
            raise bad("--expand", resolved.expand.name, "a source that gives all ranks of a clip the same text", advice)

        def own() -> TextModel | str:
            if self.source.weights == "random":
                return "the text encoder has random weights"
            if self.placement.text == "offload":
                return "the text encoder comes layer by layer, far too slow to write"
            clock.enter("load")
            pipe = self.load(resolved.workflow)
            if isinstance(pipe, WanParts):
                return "Wan's text encoder writes no text"
            clock.enter("expand")
            return TextModel(pipe.text_encoder, pipe.tokenizer, pipe.processor)

        clock.enter("expand")
        pictures = [picture_of(each.media) for each in resolved.inputs]
        expanded = self._expander.expand(resolved.expand, resolved.prompt, seed, own=own, pictures=pictures)
        if expanded.reason:
            logger.warning("prompt expansion: by template, %s", expanded.reason)
        return expanded

    def transforms_for(self, resolved: Resolved) -> Transforms:
        """What this pipeline attaches for one request; entered around its blocks."""
        rows = self.family.estimate(resolved).rows  # what doctor found fastest holds for about as many
        found, reasons = settled(self._asked, self.device, self.dtype, self.strata, self.profile, rows)
        savings = replace(self.savings, matmul=found.matmul, attention=found.attention)
        return Transforms(savings, self._kept, resolved, reasons, self.sharding.tiles, self.sharding.first)

    def stratum(self, resolved: Resolved) -> Fingerprint:
        """What a certificate must have been calibrated for to cover this request here."""
        sparse = f"+{self.recipe.sparse}" if self.recipe.sparse.is_on else ""
        return fingerprint(
            resolved,
            weights=self.source.identity,
            dtype=arithmetic(self.transforms_for(resolved).savings, self.dtype) + sparse,
            device=self.device.type,
            parallel=self.sharding.label,
            streams=self.recipe.cache.streams if isinstance(resolved, WanResolved) and resolved.is_guided else "",
        )

    def _record(self, resolved: Resolved, seed: int, raw: RawClip, stages_s: dict[str, float]) -> dict[str, Any]:
        settled = {k: v for k, v in as_plain(resolved).items() if k not in ("inputs", "notes")}
        settled |= {"seed": seed, "seconds": round(resolved.seconds, 6), "dtype": str(self.dtype).removeprefix("torch.")}
        return {
            "schema": SCHEMA,
            "status": "completed",
            "resolved": settled,
            "notes": list(resolved.notes),
            "inputs": [{"role": i.role, "name": i.name, "sha256": i.sha256} for i in resolved.inputs],
            "model": self.source.record(),
            "recipe": recipe_record(self.recipe),
            "sigmas": raw.sigmas,
            "forwards": (len(raw.sigmas["video"]) - 1) * raw.evaluations,
            "cache": raw.cache.record(),
            "attention": raw.attention,
            "parallel": self.sharding.label,
            "placement": {"weights": self.placement.kind, "text_encoder": self.placement.text, "moves": [*raw.moves]},
            "stages_s": {name: round(seconds, 3) for name, seconds in stages_s.items()},
            "peak_memory_mb": peak_memory_mb(self.device),
            "software": software(),
            "hardware": hardware(self.device),
            "environment": read_environment().record(),
        }


def denoisers(pipe: Any) -> tuple[Any, ...]:
    """The transformers that a workflow's loop asks, in the order in which it does."""
    return pipe.transformers if isinstance(pipe, WanParts) else (h3_pipeline.transformer_of(pipe),)


def open_pipeline(
    model: str | ModelSource = "pocket",
    recipe: str | Recipe = "exact",
    *,
    device: str = "auto",
    sharding: Sharding = ALONE,
    placement: Placement = AUTO,
) -> Pipeline:
    """Open a model (`pocket`, `random`, a folder, a hub id) with a recipe; weights load at the first clip.

    `sharding` shares every clip with other ranks, which must render the same requests in the same order;
    `placement` says where weights live (by default where they fit).
    Raises RequestError for a wrong name, EnvironmentFault for a device or model that is not there.
    """
    source = model if isinstance(model, ModelSource) else find_model(model, offline=read_environment().offline)
    wanted = settle(find_recipe(recipe), source)
    family, where = open_family(source), pick_device(device)
    source = fetch_weights(source, offline=read_environment().offline)
    check_digest(source)
    if source.label:
        logger.warning("%s: %s", source.name, source.label)
    place = fitted(placement, source, family, [wanted], where, is_alone=sharding is ALONE)
    return Pipeline(source, family, wanted, where, read_profile(where, read_environment()), sharding, place)


def render(requests: Request | Iterable[Request], *, model: str = "pocket", recipe: str | Recipe = "exact") -> list[Result]:
    """Render one or several requests with one opened model, in order."""
    wanted = [requests] if isinstance(requests, Request) else list(requests)
    pipeline = open_pipeline(model, recipe)
    return [pipeline.render(request) for request in wanted]
