"""From a job's settings to a deployed function of Modal: an app for each combination, found again by its name.

A deployed app's name holds a hash of all that it is made of, so two callers that deploy it at once make the same thing,
and a deployment never changes under a job that runs. It costs nothing while no job runs in it. What is checked here
before anything is started is what the client or the service wouldn't refuse when the function is deployed.
"""

import hashlib
import hmac
import json
import logging
import shlex
import tempfile
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import modal
from grpclib.exceptions import StreamTerminatedError
from modal import exception
from modal.config import config

from composer_prime.errors import BadInput, ComposerPrimeError, JobUnknown
from composer_prime.executors.base import JobSpec, Price, Resources, check_names
from composer_prime.executors.modal_job_body import run_job
from composer_prime.executors.packages import CUDA_VARIABLES, UV_IMAGE
from composer_prime.executors.services import Busy, fitting, patiently
from composer_prime.plan.prices import Machine, listed, shipped

T = TypeVar("T")

TOKEN_REMEDY = "run `modal token set`, or set MODAL_TOKEN_ID and MODAL_TOKEN_SECRET"
FAILURES = (exception.Error, StreamTerminatedError, OSError)
"""Errors of the client for requests that failed."""
MENDABLE = {
    exception.AuthError: TOKEN_REMEDY,
    exception.PermissionDeniedError: "use a token of a member of the workspace",
    exception.VersionError: "pip install --upgrade modal",
    exception.ImageBuildError: "check the image's name, and that it has a Python",
    exception.InvalidError: "correct what it names",
}
"""Those that a person can mend, and how; any other may be gone later, after the client's own three quick repeats."""


def token() -> tuple[str, str]:
    """This machine's token for Modal, id and secret. Asks Modal nothing. Raises BadInput where there is none."""
    if not (config["token_id"] and config["token_secret"]):
        raise BadInput(f"no token for Modal is set here: {TOKEN_REMEDY}")
    return config["token_id"], config["token_secret"]


class Connection:
    """A client of Modal, opened at its first use and shared by threads."""

    @cached_property
    def client(self) -> modal.Client:
        """The open client. Raises BadInput where no token is set, ExecutorError when Modal is out of reach."""
        try:
            return modal.Client.from_credentials(*token())
        except FAILURES as error:
            raise explained(error, "connection to Modal") from error

    def ask(self, what: str, request: Callable[[], T]) -> T:
        """`request()`, repeated with growing pauses while Modal is busy or out of reach.

        what  names what is asked for in messages. Raises BadInput, JobUnknown and ExecutorError (see `explained`).
        """

        def once() -> T:
            try:
                return request()
            except FAILURES as error:
                raise explained(error, what) from error

        return patiently(once)

    def close(self) -> None:
        if client := vars(self).pop("client", None):
            client.close()


def explained(error: Exception, what: str) -> ComposerPrimeError:
    """One of our errors for one of the client's; `what` was asked for."""
    # The client's text may have lines; ours are one.
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, exception.NotFoundError | exception.OutputExpiredError):
        return JobUnknown(f"{what}: Modal has no such thing ({text})")
    for kind, remedy in MENDABLE.items():
        if isinstance(error, kind) and not isinstance(error, exception.ConflictError):
            return BadInput(f"{what}: Modal refuses it ({text}): {remedy}")
    return Busy(f"{what}: Modal failed ({type(error).__name__}: {text}); look at https://modal.com/apps")


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
    region = resources.region
    placed = prices["times"]["narrow_region" if "-" in region else "broad_region"] if region else 1.0
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


logger = logging.getLogger(__name__)

PREFIX = "composer-prime-"
RUN_CHARACTERS = 36
"""Characters that are left of Modal's 64 for a run's name, beside the prefix and a hash of 12 digits."""

BODY = Path(__file__).with_name("modal_job_body.py")
STARTUP_TIMEOUT_S = 1800
"""To pull a large image and start; Modal's own default is the job's time-out, which may be seconds."""
TIMEOUT_MARGIN_S = 60
"""Modal's time-out comes so much after the container program's own, which ends the command gently and tells."""


def object_name(run: str) -> str:
    """The name of a run's object on Modal, with room for a suffix: long run names are shortened by their hash."""
    if len(run) > RUN_CHARACTERS:
        run = f"{run[: RUN_CHARACTERS - 11]}-{hashlib.sha256(run.encode()).hexdigest()[:10]}"
    return PREFIX + run


def machine(wanted: Resources) -> dict[str, Any]:
    """The machine, as Modal's client is asked for it."""
    disk_gib = wanted.disk_gib or 0
    memory_mib = None if wanted.memory_gib is None else int(wanted.memory_gib * 1024)
    return {
        "gpu": gpu_option(wanted),
        "region": wanted.region,
        "cloud": wanted.cloud,
        "nonpreemptible": wanted.nonpreemptible,
        # As much reserved as allowed: Modal bills what is used beyond a reservation.
        "cpu": None if wanted.cpus is None else (wanted.cpus, wanted.cpus),
        "memory": None if memory_mib is None else (memory_mib, memory_mib),
        "ephemeral_disk": int(disk_gib * 1024) if disk_gib > FREE_DISK_GIB else None,
    }


def _settings(spec: JobSpec) -> dict[str, Any]:
    """The settings of the job's function for Modal's client, but secrets and volumes by name."""
    return {
        **machine(spec.resources),
        "timeout": min(spec.timeout_s + TIMEOUT_MARGIN_S, MAX_TIMEOUT_S),
        "startup_timeout": STARTUP_TIMEOUT_S,
        # An attempt is one run of the command; what comes after a failure is the fleet's to say.
        "retries": 0,
        # Ends, and is no longer billed, with its one job.
        "single_use_containers": True,
        "volumes": {path: f"{PREFIX}cache-{name}" for name, path in sorted(spec.caches.items())},
    }


def app_name(spec: JobSpec) -> str:
    """The app's name: the same for the same settings, wheels, values of secrets and container program.

    Keyed by this machine's token, so that it tells nothing of the secrets.
    """
    image = [spec.image or UV_IMAGE, spec.registry_secret, dockerfile(spec)]
    made_of = {**_settings(spec), "image": image, "secrets": spec.secrets.reveal(), "body": BODY.read_text()}
    text = json.dumps(made_of, sort_keys=True)
    return f"{object_name(spec.run)}-{hmac.new(token()[1].encode(), text.encode(), hashlib.sha256).hexdigest()[:12]}"


def deployed_function(connection: Connection, spec: JobSpec) -> Any:
    """The `modal.Function` that runs such a job, deployed if it isn't yet, which bills nothing but an image's build.

    Raises BadInput for what Modal refuses (an image that can't be built), ExecutorError.
    """
    name, client = app_name(spec), connection.client
    function = modal.Function.from_name(name, run_job.__name__, client=client)
    try:
        return connection.ask(f"app {name}", function.hydrate)
    except JobUnknown:
        logger.info("modal app=%s deploying image=%s", name, spec.image)
    connection.ask(f"deployment of app {name}", lambda: _deploy(client, name, spec))
    # Looked up again: of two that were deployed at once it is the last.
    return connection.ask(f"app {name}", function.hydrate)


def _deploy(client: modal.Client, name: str, spec: JobSpec) -> None:
    app, options = modal.App(name), _settings(spec)
    with tempfile.TemporaryDirectory(prefix="wheels-") as folder:
        options["image"] = _image(spec, Path(folder))
        options["secrets"] = [modal.Secret.from_dict({**spec.secrets.reveal()})] if spec.secrets else []
        options["volumes"] = {
            path: modal.Volume.from_name(volume, create_if_missing=True) for path, volume in options["volumes"].items()
        }
        app.function(**options)(run_job)
        app.deploy(client=client)


def dockerfile(spec: JobSpec) -> tuple[list[str], list[str], list[str]]:
    """The lines after its FROM that make the job's image: before its wheels, to bring them, and to install them."""
    if (packages := spec.packages) is None:
        return [], [], []
    before = [f"RUN {each}" for each in packages.preparation]
    before += [f"ENV {name}={value}" for name, value in CUDA_VARIABLES.items() if before]
    paths = [f"/opt/{wheel.sha256[:12]}/{wheel.file}" for wheel in packages.wheels()]  # a supervisor there hands it on
    backend = "cpu" if spec.resources.gpu is None else None  # no GPU is there to ask while an image is built
    installs = packages.commands([shlex.quote(path) for path in paths], backend)
    return before, [f"COPY {Path(path).name} {path}" for path in paths], [f"RUN {each}" for each in installs]


def _image(spec: JobSpec, folder: Path) -> modal.Image:
    """The job's image, which Modal builds once and keeps, in parts; its wheels are in `folder` until then."""
    login = None if spec.registry_secret is None else modal.Secret.from_name(spec.registry_secret)
    before, copies, installs = dockerfile(spec)
    image = modal.Image.from_registry(spec.image or UV_IMAGE, secret=login).dockerfile_commands(before)
    for wheel, copy in zip(spec.packages.wheels() if spec.packages else (), copies, strict=True):
        (folder / wheel.file).write_bytes(wheel.data)
        image = image.add_local_file(folder / wheel.file, copy.split()[-1], copy=True)
    return image.dockerfile_commands(installs)
