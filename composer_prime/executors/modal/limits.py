"""What Modal runs: GPU kinds and counts, times and sizes, checked before anything is started.

The client checks counts and few names; what it lets through fails minutes later, or is billed otherwise than meant.
"""

import difflib
import re
from collections.abc import Iterable, Mapping

from composer_prime.errors import BadInput
from composer_prime.executors.base import JobSpec, Resources, gpu_kinds

SEEN = "2026-11-22"
"""The day on which the tables below were compared with modal.com/docs/guide/gpu, /resources and /timeouts."""
GPUS: Mapping[str, int] = {
    "T4": 8,
    "L4": 8,
    "A10": 4,
    "L40S": 8,
    "A100": 8,
    "A100-40GB": 8,
    "A100-80GB": 8,
    "RTX-PRO-6000": 8,
    "H100": 8,
    "H100!": 8,
    "H200": 8,
    "B200": 8,
    "B200+": 8,
}
"""Kind -> how many one container may have. "H100" may be served by an H200 and "B200+" by a B300; "H100!" may not."""
REGIONS = ("us", "eu", "uk", "ap", "ca", "sa", "me", "mx", "af")
_REGION = re.compile(rf"(?:{'|'.join(REGIONS)})(?:-[a-z]+(?:-\d)?)?")
CLOUDS = ("aws", "gcp", "oci")
OUR_PROGRAM = "composer-prime"
MAX_TIMEOUT_S = 24 * 3600
FREE_DISK_GIB, MAX_DISK_GIB = 512, 3072
"""Every container has the first; requests go from there to the second."""
_CACHE_NAME = re.compile(r"[a-zA-Z0-9._-]{1,40}")
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def check_spec(spec: JobSpec) -> None:
    """Raise BadInput, saying value, limit and remedy, for what Modal would refuse or misread (see also check_names)."""
    if not 1 <= spec.timeout_s <= MAX_TIMEOUT_S:
        raise BadInput(
            f"timeout ({spec.timeout_s} s) must be 1 s to {MAX_TIMEOUT_S} s (24 h) on Modal: choose one in between; "
            "a site that is started again resumes from the bucket"
        )
    if spec.image is None and spec.packages is None and spec.command[0] == OUR_PROGRAM:
        raise BadInput(
            f"image is not set, and Modal's own has no {OUR_PROGRAM}: name one that has it by --image or launch.image "
            "(infra/docker/Dockerfile makes one)"
        )
    gpu_option(spec.resources)
    _check_placement(spec.resources)
    _check_sizes(spec.resources)
    for name, path in spec.caches.items():
        if not _CACHE_NAME.fullmatch(name):
            raise BadInput(
                f"cache name ({name!r}) must be 1 to 40 letters, digits, '.', '_' and '-': it names a Modal volume"
            )
        if not path.startswith("/") or path.strip("/") in ("", "root", "tmp"):
            raise BadInput(f"cache {name}: {path!r} can't be a volume's place on Modal: give a path such as /caches/hf")
    _check_env(spec)


def gpu_option(resources: Resources) -> str | list[str] | None:
    """Modal's `gpu`: "H100:2", or several of which any serves; None: no GPU.

    Raises BadInput for a kind or a count that Modal doesn't have.
    """
    if resources.gpu is None and resources.gpu_count:
        raise BadInput(f"gpu_count ({resources.gpu_count}) without a GPU kind: name one of {', '.join(GPUS)}")
    options = [_gpu_option(kind, resources.gpu_count) for kind in gpu_kinds(resources)]
    return options if len(options) > 1 else next(iter(options), None)


def _gpu_option(asked: str, count: int) -> str:
    kind = asked.upper()
    if kind not in GPUS:
        raise BadInput(
            f"GPU {asked!r} is none of Modal's: nearest {', '.join(nearest(kind, GPUS))}; "
            f"all, as of {SEEN}: {', '.join(GPUS)}"
        )
    if not 1 <= count <= GPUS[kind]:
        raise BadInput(f"gpu_count ({count}) must be 1 to {GPUS[kind]} for {kind} on Modal: use more sites instead")
    return kind if count == 1 else f"{kind}:{count}"


def _check_placement(resources: Resources) -> None:
    if resources.region is not None and not _REGION.fullmatch(resources.region):
        near = nearest(resources.region.lower(), REGIONS)
        raise BadInput(
            f"launch.region ({resources.region}) isn't in a region of Modal's: nearest {', '.join(near)}; all, as of "
            f"{SEEN}: {', '.join(REGIONS)}, and narrower ones such as us-west"
        )
    if resources.cloud is not None and resources.cloud not in CLOUDS:
        raise BadInput(f"launch.cloud ({resources.cloud}) is none of Modal's: name one of {', '.join(CLOUDS)}")
    if resources.nonpreemptible and resources.gpu is not None:
        raise BadInput("launch.nonpreemptible (true) isn't to be had with a GPU on Modal: drop one of them")


def unbounded(resources: Resources) -> str:
    """What to set before an hour's price is the most that an hour can cost; "": it is."""
    unset = [f"launch.{name}" for name in ("cpus", "memory_gib") if getattr(resources, name) is None]
    if unset:
        return f"set {' and '.join(unset)}, which are limits then"
    if resources.disk_gib is not None and resources.disk_gib > FREE_DISK_GIB:
        return (
            f"set launch.disk_gib ({resources.disk_gib:g}) to {FREE_DISK_GIB} at most, since more is billed as memory"
        )
    return ""


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """Up to three names of `known` that are most like `name`."""
    return difflib.get_close_matches(name, list(known), n=3, cutoff=0.0)


def _check_sizes(resources: Resources) -> None:
    for name in ("cpus", "memory_gib"):
        value = getattr(resources, name)
        if value is not None and value <= 0:
            raise BadInput(f"{name} ({value}) must be above 0: leave it out for Modal's own choice")
    disk_gib = resources.disk_gib
    if disk_gib is not None and not 0 < disk_gib <= MAX_DISK_GIB:
        raise BadInput(
            f"disk_gib ({disk_gib}) must be above 0 and at most {MAX_DISK_GIB} on Modal: keep what is large in a cache"
        )


def _check_env(spec: JobSpec) -> None:
    both = sorted(set(spec.env) & set(spec.secrets))
    if both:
        raise BadInput(f"{', '.join(both)} is given as a variable and as a secret: give it as a secret alone")
    for name in (*spec.env, *spec.secrets):
        # Containers find Modal by these.
        if not _ENV_NAME.fullmatch(name) or name.startswith("MODAL_"):
            raise BadInput(f"{name!r} can't be an environment variable of a job on Modal: choose another name")
