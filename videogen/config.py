"""Every option as a frozen value, checked when it is made; the only reader of environment variables."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from PIL import Image

from caches.certificate import Certificate, Fingerprint
from caches.policy import WARM_UP
from caches.prior import Prior
from lora.contract import Contract
from videogen.attention.options import OFF, SparseAttention
from videogen.checks import check_flag, check_guidance, check_prompt, check_size, check_tuple, check_whole, is_number
from videogen.errors import bad
from videogen.text.source import TextSource
from videogen.transforms.options import UNTOUCHED, Savings

Media = str | Path | Image.Image

MAX_STEPS = 1000
MAX_SEED = 2**63 - 1
MAX_STRENGTH = 1000
EXPERTS = ("high", "low", "both")  # of Wan 2.2: the first, the second
SHIPPED = "model:"  # begins the name of an adapter that the model itself ships
NO_TERMS = Contract()
DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda", "mps")


@dataclass(frozen=True, slots=True)
class Request:
    """What one clip should be. Unset fields take the model's own value.

    steps counts model evaluations (forwards); frames are snapped up to the model's ladder; size is (width, height) in
    pixels; image and last_image are the first and last frame; references are pictures the model should look at; expand is
    the text model that completes the prompt (`videogen.text.source.find_text_source`); negative_prompt and guidance (one scale, or
    one for each of two experts) are for families that guide with a second forward, and H3 is none.
    Raises RequestError on a value no model could take; what depends on the model is checked by its family.
    """

    prompt: str
    image: Media | None = None
    last_image: Media | None = None
    references: tuple[Media, ...] = ()
    size: tuple[int, int] | None = None
    frames: int | None = None
    seconds: float | None = None
    steps: int | None = None
    seed: int | None = None
    round_size: bool = False
    expand: TextSource | None = None
    negative_prompt: str = ""
    guidance: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        check_prompt(self.prompt)
        check_whole("frames", self.frames, 1, 100_000)
        check_whole("steps", self.steps, 1, MAX_STEPS)
        check_whole("seed", self.seed, 0, MAX_SEED)
        check_flag("round_size", self.round_size)
        if self.frames is not None and self.seconds is not None:
            raise bad("frames and seconds", (self.frames, self.seconds), "only one of the two", "drop frames or seconds")
        if self.seconds is not None and not (is_number(self.seconds) and 0 < self.seconds < 10_000):
            raise bad("seconds", self.seconds, "a positive number", "change seconds")
        check_size(self.size)
        if self.negative_prompt:
            check_prompt(self.negative_prompt, "negative_prompt")
        check_guidance(self.guidance)
        if not isinstance(self.references, tuple | list):
            raise bad("references", self.references, "several pictures in a tuple", "put a single one in a tuple too")
        if self.expand is not None and not isinstance(self.expand, TextSource):
            raise bad("expand", self.expand, "a TextSource", "pass find_text_source(name)")
        if self.references and (self.image is not None or self.last_image is not None):
            raise bad("references together with image/last_image", len(self.references), "one workflow per clip", "drop one of the two")

    @property
    def workflow(self) -> str:
        """`t2va` (text), `fl2va` (first and/or last frame) or `ref2va` (reference pictures)."""
        if self.references:
            return "ref2va"
        return "t2va" if self.image is None and self.last_image is None else "fl2va"


@dataclass(frozen=True, slots=True)
class StepCache:
    """The step cache of a recipe. lam is the largest drift reused over, 0 is off; video_order and audio_order are those
    of the polynomial that replaces a reused step (0 copies), drift_order that of the one drift is measured from; warm_up is the
    share of the steps that is computed first in any case; streams says whether the two forwards of a guided step decide each or
    together, the unconditional one then following the other. prior is what was measured of the schedule's residuals: reused steps are
    then the best linear combination of the last order + 1 computed ones, and lambda is the error expected of that; prior_file is
    the name of its file and prior_of where it was measured.

    A certificate sets all of them for the requests of its stratum; for requests of none's `on_mismatch` is `refuse` or `compute`.
    """

    lam: float = 0.0
    max_streak: int = 3
    video_order: int = 2
    audio_order: int = 2
    drift_order: int = 1
    warm_up: float = WARM_UP
    streams: str = "each"
    prior: Prior | None = None
    prior_file: str = ""
    prior_of: Fingerprint | None = None
    certificates: tuple[Certificate, ...] = ()
    on_mismatch: str = "refuse"

    def __post_init__(self) -> None:
        if self.streams not in ("each", "together"):
            raise bad("cache streams", self.streams, "each or together", "change it")
        if self.on_mismatch not in ("refuse", "compute"):
            raise bad("cache mismatch", self.on_mismatch, "refuse or compute", "change --cache-mismatch")
        if not (is_number(self.lam) and self.lam >= 0):
            raise bad("cache lambda", self.lam, "a finite number of at least 0", "use 0 to switch the cache off")
        check_whole("cache max_streak", self.max_streak, 1, MAX_STEPS)
        check_tuple("certificates", self.certificates, Certificate)
        if not (is_number(self.warm_up) and 0 <= self.warm_up <= 1):
            raise bad("cache warm_up", self.warm_up, "a share of the steps from 0 to 1", "change it")
        for name in ("video_order", "audio_order", "drift_order"):
            check_whole(f"cache {name}", getattr(self, name), 0, 2 if self.prior is None else 7)


@dataclass(frozen=True, slots=True)
class AdapterUse:
    """One adapter file at a strength (None: the one it was trained for, else 1); `model:NAME` is one the model ships.

    Reading the file fills `strength` and `digest`. Of two experts it goes on `expert`, or, where that is empty, as its name says.
    """

    file: str
    strength: float | None = None
    digest: str = ""
    expert: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.file, str) or not self.file.removeprefix(SHIPPED).strip() or "\0" in self.file:
            raise bad("adapter file", self.file, "a path as text, or model:NAME", "correct it")
        if self.expert not in ("", *EXPERTS):
            raise bad(f"expert of {self.name}", self.expert, f"one of {', '.join(EXPERTS)}", "correct it")
        if self.strength is None:
            return
        if not is_number(self.strength) or abs(self.strength) > MAX_STRENGTH:
            raise bad(f"strength of {self.name}", self.strength, f"a number up to {MAX_STRENGTH}", "use 1 for the one it was trained at")

    @property
    def name(self) -> str:
        """The file without its folder, which is nobody else's business."""
        return self.file if self.file.startswith(SHIPPED) else Path(self.file).name


@dataclass(frozen=True, slots=True)
class Adapters:
    """The adapters of a recipe. `contract` is `apply`, or `ignore`: then only `stated` holds, the user's FIELD=VALUE words.

    Reading the files (`videogen.adapters.settle`) fills `terms`, what all of them ask of the sampling, `identity` and `notes`.
    """

    uses: tuple[AdapterUse, ...] = ()
    contract: str = "apply"
    stated: tuple[str, ...] = ()
    fuse: bool = False
    terms: Contract = NO_TERMS
    identity: str = ""
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.contract not in ("apply", "ignore"):
            raise bad("adapter contract", self.contract, "apply or ignore", "change --lora-contract")
        check_tuple("adapters", self.uses, AdapterUse)
        check_tuple("adapter contract", self.stated, str)
        check_flag("adapter fuse", self.fuse)
        for word in self.stated:
            if not word.partition("=")[2]:
                raise bad("adapter contract", word, "apply, ignore or FIELD=VALUE such as shift_video=6", "change --lora-contract")

    @property
    def is_settled(self) -> bool:
        """Whether the files were read, or there are none."""
        return bool(self.identity) or not self.uses


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a clip is computed. The default is the plain, unaccelerated model."""

    name: str = "plain"
    steps: int | None = None
    dtype: str = "auto"
    savings: Savings = UNTOUCHED
    cache: StepCache = StepCache()
    sparse: SparseAttention = OFF
    adapters: Adapters = Adapters()

    def __post_init__(self) -> None:
        check_prompt(self.name, "recipe name")
        check_whole("recipe steps", self.steps, 1, MAX_STEPS)
        if self.dtype not in DTYPES:
            raise bad("dtype", self.dtype, f"one of {', '.join(DTYPES)}", "change dtype")


@dataclass(frozen=True, slots=True)
class Environment:
    """The environment variables in force; secrets are held as 'set', never as values."""

    output_dir: str = "outputs"
    values: tuple[tuple[str, str], ...] = ()
    offline: bool = False
    no_color: bool = False
    rank: int = 0  # of this process among world_size, as torchrun and accelerate say it
    local_rank: int = 0
    world_size: int = 1
    run: str = ""  # of which this process is a worker, as `videogen render --gpus` says it
    worker: int = 0
    device_profiles: str = ""  # the folder `videogen doctor --save` writes to; empty switches profiles off

    def record(self) -> dict[str, str]:
        """What the sidecar stores: the variables that were set, in name order."""
        return dict(self.values)


_KEPT = (
    *("CUDA_VISIBLE_DEVICES", "HF_HOME", "HF_HUB_OFFLINE", "NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "OMP_NUM_THREADS", "OMP_WAIT_POLICY"),
    "PYTORCH_CUDA_ALLOC_CONF",
)
_SECRET = ("HF_TOKEN", "VIDEOGEN_API_KEY")
_TRUE = ("1", "true", "yes", "on")


def read_environment(variables: Mapping[str, str] | None = None) -> Environment:
    """Read the variables videogen honours (the process's own by default)."""
    env = os.environ if variables is None else variables
    values = [(name, env[name]) for name in _KEPT if name in env] + [(name, "set") for name in _SECRET if env.get(name)]
    return Environment(
        output_dir=env.get("VIDEOGEN_OUTPUT_DIR") or "outputs",
        values=tuple(sorted(values)),
        offline=env.get("HF_HUB_OFFLINE", "").lower() in _TRUE,
        no_color=bool(env.get("NO_COLOR")),
        rank=_count(env, "RANK", 0),
        local_rank=_count(env, "LOCAL_RANK", 0),
        world_size=_count(env, "WORLD_SIZE", 1),
        run=env.get("VIDEOGEN_RUN", ""),
        worker=_count(env, "VIDEOGEN_WORKER", 0),
        device_profiles=env.get("VIDEOGEN_DEVICE_PROFILES", f"{env.get('XDG_CACHE_HOME') or '~/.cache'}/videogen/devices"),
    )


def read_api_keys() -> str:
    """The value of VIDEOGEN_API_KEY; apart from `Environment`, so that no record can hold it."""
    return os.environ.get("VIDEOGEN_API_KEY", "")


def child_environment(**changes: str) -> dict[str, str]:
    """The environment of a worker process: ours without the server's keys, with some values changed."""
    return {name: value for name, value in os.environ.items() if name != "VIDEOGEN_API_KEY"} | changes


def _count(env: Mapping[str, str], name: str, default: int) -> int:
    text = env.get(name) or str(default)
    if not text.isdecimal():
        raise bad(name, text, "a whole number of at least 0", "start through torchrun or accelerate launch, or unset it")
    return int(text)


def recipe_record(recipe: Recipe) -> dict[str, Any]:
    """A recipe as the sidecar stores it: adapters by name and content, without the folders they lie in."""
    adapters = recipe.adapters
    uses = [{"file": use.name, "strength": use.strength, "digest": use.digest, "expert": use.expert} for use in adapters.uses]
    asked = {"uses": uses, "contract": adapters.contract, "stated": list(adapters.stated), "fuse": adapters.fuse}
    plain: dict[str, Any] = as_plain(recipe)
    return plain | {"adapters": asked}


def as_plain(value: Any) -> Any:
    """A dataclass, path or tuple as JSON-ready plain data; pictures in memory become their description."""
    if isinstance(value, Image.Image):
        return f"<picture {value.width}x{value.height} {value.mode}>"
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Prior):
        return {"digest": value.digest, "clips": value.clips}
    if isinstance(value, tuple | list):
        return [as_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): as_plain(item) for key, item in value.items()}
    if hasattr(value, "__dataclass_fields__"):
        return {field.name: as_plain(getattr(value, field.name)) for field in fields(value)}
    return value
