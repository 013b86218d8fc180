"""The jobs that Modal runs, checked before anything is started, and their prices.

All else the client or the service refuses when the function is deployed, before anything is billed.
"""

from composer_prime.errors import BadInput
from composer_prime.executors.base import JobSpec, Price, Resources, check_names
from composer_prime.executors.choice import fitting
from composer_prime.plan.prices import Machine, listed, shipped

REGIONS = ("us", "eu", "uk", "ap", "ca", "sa", "me", "mx", "af")
"""With narrower ones in each, by modal.com/docs/guide/region-selection on 2026-11-22."""
MAX_TIMEOUT_S = 24 * 3600
DEFAULT_CPUS = DEFAULT_GIB = 0.125
"""Reserved unasked."""
FREE_DISK_GIB = 512
"""Every container has so much; more is billed as memory."""


def check_spec(spec: JobSpec) -> None:
    """Raise BadInput, saying value, limit and remedy, for what no container of Modal's would run as meant."""
    check_names(spec)
    if spec.timeout_s > MAX_TIMEOUT_S:
        raise BadInput(
            f"timeout ({spec.timeout_s} s) must be at most {MAX_TIMEOUT_S} s (24 h) on Modal: lower it; a site that is "
            "started again resumes from the bucket"
        )
    gpu_option(spec.resources)
    region = spec.resources.region
    if region is not None and region.partition("-")[0] not in REGIONS:
        raise BadInput(f"launch.region ({region}) is none of Modal's: {', '.join(REGIONS)}, or one in these (us-west)")
    if spec.resources.nonpreemptible and spec.resources.gpu is not None:
        raise BadInput("launch.nonpreemptible (true) isn't to be had with a GPU on Modal: drop one of them")


def gpu_option(resources: Resources) -> str | list[str] | None:
    """Modal's `gpu`: "H100:2", or several of which any serves; None: no GPU.

    Raises BadInput for a kind or a count that Modal doesn't have.
    """
    machines = [each for each in _machines(resources) if each.gpu]
    options = [each.gpu if each.num_gpus == 1 else f"{each.gpu}:{each.num_gpus}" for each in machines]
    return options if len(options) > 1 else next(iter(options), None)


def price(resources: Resources) -> Price:
    """A container's price by the second, with the dearest of the GPUs that may serve it. Raises as `gpu_option`."""
    prices, source = listed("modal")
    dearest = max(each.usd_per_hour or 0.0 for each in _machines(resources))
    rest = (DEFAULT_CPUS if resources.cpus is None else resources.cpus) * prices["usd_per_cpu_hour"]
    rest += (DEFAULT_GIB if resources.memory_gib is None else resources.memory_gib) * prices["usd_per_gib_hour"]
    if resources.nonpreemptible:
        rest *= prices["times"]["nonpreemptible"]
    if (region := resources.region) is None:
        placed = 1.0
    else:
        placed = prices["times"]["narrow_region" if "-" in region else "broad_region"]
    return Price(placed * (dearest + rest), source, unbounded=_unbounded(resources))


def _machines(resources: Resources) -> list[Machine]:
    return fitting(shipped("modal"), resources, "Modal")


def _unbounded(resources: Resources) -> str:
    """The settings to make before an hour's price is the most that an hour can cost; "": it is."""
    unset = [f"launch.{name}" for name in ("cpus", "memory_gib") if getattr(resources, name) is None]
    if unset:
        return f"set {' and '.join(unset)}, which are limits then"
    if (resources.disk_gib or 0) > FREE_DISK_GIB:
        return f"set launch.disk_gib ({resources.disk_gib:g}) to {FREE_DISK_GIB} at most: more is billed as memory"
    return ""
