"""What Modal runs: GPU kinds and counts, times and regions, checked before anything is started.

All else the client or the service refuses when the function is deployed, before anything is billed.
"""

import difflib
import re
from collections.abc import Iterable, Mapping

from composer_prime.errors import BadInput
from composer_prime.executors.base import JobSpec, Resources, check_names, gpu_kinds

SEEN = "2026-11-22"
"""The day on which the tables below were compared with modal.com/docs/guide/gpu, /resources and /timeouts."""
GPUS: Mapping[str, int] = {
    **dict.fromkeys(("T4", "L4", "L40S", "A100", "A100-40GB", "A100-80GB", "RTX-PRO-6000"), 8),
    **dict.fromkeys(("H100", "H100!", "H200", "B200", "B200+"), 8),
    "A10": 4,
}
"""Kind -> how many one container may have. "H100" may be served by an H200 and "B200+" by a B300; "H100!" may not."""
REGIONS = ("us", "eu", "uk", "ap", "ca", "sa", "me", "mx", "af")
_REGION = re.compile(rf"(?:{'|'.join(REGIONS)})(?:-[a-z]+(?:-\d)?)?")
MAX_TIMEOUT_S = 24 * 3600
FREE_DISK_GIB = 512
"""Every container has so much; more is billed as memory."""


def check_spec(spec: JobSpec) -> None:
    """Raise BadInput, saying value, limit and remedy, for what no container of Modal's would run as meant."""
    check_names(spec)
    wanted = spec.resources
    if spec.timeout_s > MAX_TIMEOUT_S:
        raise BadInput(
            f"timeout ({spec.timeout_s} s) must be at most {MAX_TIMEOUT_S} s (24 h) on Modal: lower it; a site that is "
            "started again resumes from the bucket"
        )
    gpu_option(wanted)
    if wanted.region is not None and not _REGION.fullmatch(wanted.region):
        raise BadInput(
            f"launch.region ({wanted.region}) is none of Modal's: {_nearest(wanted.region.lower(), REGIONS)}, "
            "and narrower ones such as us-west"
        )
    if wanted.nonpreemptible and wanted.gpu is not None:
        raise BadInput("launch.nonpreemptible (true) isn't to be had with a GPU on Modal: drop one of them")


def gpu_option(resources: Resources) -> str | list[str] | None:
    """Modal's `gpu`: "H100:2", or several of which any serves; None: no GPU.

    Raises BadInput for a kind or a count that Modal doesn't have.
    """
    options = []
    for kind in gpu_kinds(resources):
        count, most = resources.gpu_count, GPUS.get(kind.upper())
        if most is None:
            raise BadInput(f"GPU {kind!r} is none of Modal's: {_nearest(kind.upper(), GPUS)}")
        if not 1 <= count <= most:
            raise BadInput(f"gpu_count ({count}) must be 1 to {most} for {kind} on Modal: use more sites instead")
        options.append(kind.upper() if count == 1 else f"{kind.upper()}:{count}")
    return options if len(options) > 1 else next(iter(options), None)


def unbounded(resources: Resources) -> str:
    """What to set before an hour's price is the most that an hour can cost; "": it is."""
    unset = [f"launch.{name}" for name in ("cpus", "memory_gib") if getattr(resources, name) is None]
    if unset:
        return f"set {' and '.join(unset)}, which are limits then"
    if (resources.disk_gib or 0) > FREE_DISK_GIB:
        return (
            f"set launch.disk_gib ({resources.disk_gib:g}) to {FREE_DISK_GIB} at most, since more is billed as memory"
        )
    return ""


def _nearest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=3, cutoff=0.0)
    return f"nearest {', '.join(near)}; all, as of {SEEN}: {', '.join(known)}"
