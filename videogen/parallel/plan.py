"""Which layout of devices renders H3 clips fastest, for many clips and for one: a cost model on plain values; loads no torch.

A forward is products, attention and the rest (norms, copies), each a measured rate of one H200 at released sizes (docs/benchmarks.md)
times one factor a device and engine; what ranks exchange is bytes over the link's measured or stated bandwidth. What the model
gets wrong, against published figures, is in docs/parallel.md.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from videogen.errors import bad

# the released transformer, and its measured seconds on one H200 (torch 2.11, bf16, 37,836 rows: 1.90 + 3.63 + 0.98 s)
LAYERS, HIDDEN, HEADS, HEAD_DIM, FFN = 50, 5376, 56, 128, 14336
PRODUCT_FLOPS, ATTENTION_FLOPS, REST_S_PER_ROW = 767e12, 565e12, 25.9e-6
# gigabytes of 10^9 bytes: denoiser whole and without AdaLN projections, text encoder cut at layer 50, VAEs; measured peaks less weights
WEIGHTS_GB, PARKED_GB, TEXT_GB, VAE_GB = 66.2, 41.1, 51.5, 6.2
# what visits: of the denoiser, and of the VAE all but two blocks; of the text encoder what is there at most, two layers and the rest
BLOCKS_GB, DECODER_GB, TEXT_PART_GB = 38.5, 4.6, 4.7
ACTIVATION_GB_PER_ROW, CONTEXT_GB = 1.4e-4, 1.5
TILES, DECODE_FRAMES = 28, 124  # tiles of one chunk at 1344x768
GIB = 1.073741824  # gigabytes
LINKS_GBS = {"pcie3": 11.0, "pcie4": 22.0, "pcie5": 45.0, "nvlink": 300.0, "nvlink5": 600.0}


@dataclass(frozen=True, slots=True)
class Workload:
    """Clips of one kind: rows of the packed sequence, frames, forwards."""

    name: str
    rows: int
    frames: int
    forwards: int = 49


def h3(name: str, frames: int, *, keyframes: int = 0, more_rows: int = 0, forwards: int = 49) -> Workload:
    """An H3 clip at 1344x768 with a prompt of 126 tokens; `keyframes` pictures of two latent frames each."""
    latent = (frames - 5) // 17 * 5 + 2
    return Workload(name, 126 + 2 * round(frames / 24 * 40) + 1008 * (latent + 2 * keyframes) + more_rows, frames, forwards)


_KINDS = (
    *(h3(f"h3-t2va-{s}s", frames) for s, frames in ((5, 124), (10, 243), (15, 345))),
    *(h3(f"h3-fl2va-{s}s", frames, keyframes=1) for s, frames in ((5, 124), (10, 243), (15, 345))),
    *(h3(f"h3-ref2va-{s}s", frames, more_rows=14_599) for s, frames in ((5, 124), (15, 345))),  # as measured, two pictures
)
WORKLOADS = {each.name: each for each in _KINDS}


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU under one engine: seconds in units of the measured H200's, memory, its usual link, decoding of 124 frames alone."""

    name: str
    factor: float
    memory_gib: float
    link: str = "nvlink"
    decode_s: float = 5.3
    fixed_s: float = 0.5
    host_gbs: float = 25.0
    is_decode_spread: bool = True  # tiles over the ranks of a clip
    rest_s_per_row: float = REST_S_PER_ROW
    packing_gbs: float = float("inf")  # what is sent is also cut up, joined and waited for at every layer


EXACT_REST_S_PER_ROW, PACKING_GBS = 11.65e-6, 275.0  # of `exact`, its kernels fused; two ranks of this project (docs/parallel.md)
DEVICES = {  # factors as `published.py` calibrates them, each on one row; h200 is this project's own measurement of `exact`
    "h200": Device("h200", 1.0, 139.8, decode_s=3.91, rest_s_per_row=EXACT_REST_S_PER_ROW, packing_gbs=PACKING_GBS),
    "b300": Device("b300", 0.39, 268.0, link="nvlink5", decode_s=5.1),
    "rtx-pro-6000": Device("rtx-pro-6000", 1.84, 95.0, link="pcie5", decode_s=10.8),
    "rtx-6000d": Device("rtx-6000d", 3.34, 84.0, link="pcie5", decode_s=16.0),
}
SIMPLEST = ("whole", "parked", "fsdp", "offload")  # among layouts within one per cent of each other


@dataclass(frozen=True, slots=True)
class Layout:
    """`replicas` of ulysses x tensor ranks. weights: `whole` on every rank, `parked` (AdaLN projections in host memory, their tables
    on the device), and parked as well `fsdp` (sharded over the ranks of a clip, gathered layer by layer) or `offload` (from host
    memory, layer by layer). Tensor parallelism is priced, not offered: diffusers 0.42.1 has no plan of it for H3."""

    replicas: int = 1
    ulysses: int = 1
    tensor: int = 1
    weights: str = "whole"

    @property
    def ranks(self) -> int:
        """Devices of one clip."""
        return self.ulysses * self.tensor

    @property
    def label(self) -> str:
        """`2 x U4`, `1 x U2 fsdp`."""
        tensor = f" x TP{self.tensor}" if self.tensor > 1 else ""
        return f"{self.replicas} x U{self.ulysses}{tensor}" + ("" if self.weights == "whole" else f" {self.weights}")


@dataclass(frozen=True, slots=True)
class Cost:
    """What one clip costs under a layout: seconds of a forward by part, of the clip, and gigabytes a device."""

    layout: Layout
    compute_s: float
    exchange_s: float
    stream_s: float
    clip_s: float
    memory_gib: float
    room_gib: float
    text: str = "resident"

    @property
    def label(self) -> str:
        """The layout, and how the text encoder comes where it lives in host memory."""
        return self.layout.label + {"resident": "", "visiting": ", text visits", "offload": ", text by layers"}[self.text]

    @property
    def forward_s(self) -> float:
        """Streamed weights hide behind everything else, or everything else behind them."""
        return max(self.compute_s + self.exchange_s, self.stream_s)

    @property
    def fits(self) -> bool:
        """Whether a device holds it."""
        return self.memory_gib <= self.room_gib

    def clips_per_hour(self, in_flight: int) -> float:
        """Of `in_flight` clips that are all there at the beginning."""
        return 3600 * in_flight / (self.waves(in_flight) * self.clip_s)

    def mean_wait_s(self, in_flight: int) -> float:
        """From the beginning to a clip's end, on average over those clips."""
        return sum(done // self.layout.replicas + 1 for done in range(in_flight)) * self.clip_s / in_flight

    def waves(self, in_flight: int) -> int:
        """How often every replica begins a clip."""
        return -(-in_flight // self.layout.replicas)


def compute_s(workload: Workload, device: Device, layout: Layout) -> float:
    """Of one forward on one rank, the one with the most rows and heads."""
    ranks, rows = layout.ranks, -(-workload.rows // layout.ulysses)
    products = 2 * rows * (4 * HIDDEN * HEADS * HEAD_DIM + 3 * HIDDEN * FFN) * LAYERS / layout.tensor / PRODUCT_FLOPS
    heads = -(-HEADS // ranks)
    attention = 4 * workload.rows**2 * heads * HEAD_DIM * LAYERS / ATTENTION_FLOPS
    return device.factor * (products + attention + rows * device.rest_s_per_row)


def exchange_gb(workload: Workload, layout: Layout) -> float:
    """What one rank sends in one forward: queries, keys, values and outputs for heads; partial sums of tensor ranks."""
    rows, ulysses, tensor = workload.rows / layout.ulysses, layout.ulysses, layout.tensor
    for_heads = 4 * rows * HEADS * HEAD_DIM / tensor * 2 * (ulysses - 1) / ulysses
    sums = 2 * 2 * rows * HIDDEN * 2 * (tensor - 1) / tensor
    return (for_heads + sums) * LAYERS / 1e9


def memory_gib(workload: Workload, layout: Layout, text: str = "resident") -> float:
    """Of a clip's first device, which has the text encoder: all the time, or while it encodes, or (`offload`) two layers of it."""
    visitors, rest = 2 * BLOCKS_GB / LAYERS, PARKED_GB - BLOCKS_GB
    held = {
        "whole": WEIGHTS_GB / layout.tensor,
        "parked": PARKED_GB / layout.tensor,
        "fsdp": rest + BLOCKS_GB / layout.ranks + visitors,
        "offload": rest + visitors - DECODER_GB,
    }[layout.weights]
    rows = workload.rows / layout.ulysses * ACTIVATION_GB_PER_ROW
    rows += 8 * workload.rows * HEADS * HEAD_DIM / layout.ranks / 1e9  # q, k, v and out of this rank's heads
    encoding = {"resident": TEXT_GB + rows, "visiting": max(TEXT_GB, rows), "offload": max(TEXT_PART_GB, rows)}[text]
    return (held + VAE_GB + CONTEXT_GB + encoding) / GIB


def price(workload: Workload, device: Device, layout: Layout, link_gbs: float, *, overlap: float = 0.0) -> Cost:
    """One clip under a layout; `overlap` is the share of exchanges hidden behind computing.

    The text encoder stays on a clip's first device where it fits, else it visits from host memory once a clip, as a whole or by layers.
    """
    computing = compute_s(workload, device, layout)
    sent = exchange_gb(workload, layout)
    exchanging = sent / link_gbs * (1 - overlap) + sent / device.packing_gbs
    streaming = {"fsdp": BLOCKS_GB * (1 - 1 / layout.ranks) / link_gbs, "offload": BLOCKS_GB / device.host_gbs}.get(layout.weights, 0.0)
    decode = device.decode_s * workload.frames / DECODE_FRAMES
    decode *= -(-TILES // layout.ranks) / TILES if device.is_decode_spread else 1
    needs = {text: memory_gib(workload, layout, text) for text in ("resident", "visiting", "offload")}
    text = next((text for text, need in needs.items() if need <= device.memory_gib), "offload")
    cost = Cost(layout, computing, exchanging, streaming, 0.0, needs[text], device.memory_gib, text)
    encode = 0.0 if text == "resident" else TEXT_GB / device.host_gbs
    return replace(cost, clip_s=encode + workload.forwards * cost.forward_s + decode + device.fixed_s)


def layouts(gpus: int) -> list[Layout]:
    """Every layout that this project offers on so many devices."""
    found = []
    for ulysses in (size for size in range(1, gpus + 1) if gpus % size == 0 and size <= HEADS):
        kinds = ("whole", "parked", "fsdp", "offload") if ulysses > 1 else ("whole", "parked", "offload")
        found += [Layout(gpus // ulysses, ulysses, weights=kind) for kind in kinds]
    return found


@dataclass(frozen=True, slots=True)
class Plan:
    """Layouts that fit, best first for many clips and for one, and those that do not fit."""

    throughput: tuple[Cost, ...]
    latency: tuple[Cost, ...]
    refused: tuple[Cost, ...]

    def why(self, in_flight: int) -> list[str]:
        """The choice in sentences."""
        if not self.throughput:
            least = min(self.refused, key=lambda each: each.memory_gib)
            return [f"nothing fits: the smallest, {least.label}, needs {least.memory_gib:.0f} of {least.room_gib:.0f} GiB a device"]
        many, one = self.throughput[0], self.latency[0]
        share = one.exchange_s / one.forward_s
        told = [
            f"most clips: {many.label}, {many.clips_per_hour(in_flight):.1f} clips/h with {in_flight} in flight",
            f"fastest clip: {one.label}, {one.clip_s:.1f} s, {share:.0%} of a forward exchanging",
        ]
        if many.layout != one.layout:
            lost = 1 - one.clips_per_hour(in_flight) / many.clips_per_hour(in_flight)
            told.append(f"the fastest clip costs {lost:.0%} of the clips an hour")
        reasons = {f"{each.label} needs {each.memory_gib:.0f} of {each.room_gib:.0f} GiB a device" for each in self.refused}
        return told + sorted(reasons)


def rank(workload: Workload, device: Device, candidates: Iterable[Layout], link_gbs: float, in_flight: int) -> Plan:
    """Price the candidates and order those that fit; within one per cent the simpler layout comes first."""
    costs = [price(workload, device, layout, link_gbs) for layout in candidates]
    fitting = [cost for cost in costs if cost.fits]
    most = max((cost.clips_per_hour(in_flight) for cost in fitting), default=1.0)
    fastest = min((cost.clip_s for cost in fitting), default=1.0)

    def simplicity(cost: Cost) -> tuple[int, int]:
        return SIMPLEST.index(cost.layout.weights), cost.layout.ranks

    many = sorted(fitting, key=lambda cost: (-round(cost.clips_per_hour(in_flight) / most, 2), *simplicity(cost)))
    one = sorted(fitting, key=lambda cost: (round(cost.clip_s / fastest, 2), *simplicity(cost)))
    return Plan(tuple(many), tuple(one), tuple(cost for cost in costs if not cost.fits))


def link_gbs(name: str) -> float:
    """Gigabytes a second that one rank sends in an all-to-all: a known link, or a number as `videogen doctor` measured it.

    Raises RequestError for anything else.
    """
    try:
        value = LINKS_GBS[name] if name in LINKS_GBS else float(name)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e5:
        raise bad("--link", name, f"one of {', '.join(LINKS_GBS)}, or gigabytes a second", "change --link")
    return value
