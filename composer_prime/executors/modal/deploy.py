"""From a job's settings to a deployed function of Modal: an app for each combination, found again by its name.

A deployed app's name holds a hash of all that it is made of, so two callers that deploy it at once make the same thing,
and a deployment never changes under a job that runs. It costs nothing while no job runs in it.
"""

import hashlib
import hmac
import json
import logging
import shlex
import tempfile
from pathlib import Path
from typing import Any

import modal

from composer_prime.errors import JobUnknown
from composer_prime.executors.base import JobSpec, Resources
from composer_prime.executors.modal.client import Connection, token
from composer_prime.executors.modal.job_body import run_job
from composer_prime.executors.modal.limits import FREE_DISK_GIB, MAX_TIMEOUT_S, gpu_option
from composer_prime.executors.packages import CUDA_VARIABLES, UV_IMAGE

logger = logging.getLogger(__name__)

PREFIX = "composer-prime-"
RUN_CHARACTERS = 36
"""Characters that are left of Modal's 64 for a run's name, beside the prefix and a hash of 12 digits."""

BODY = Path(__file__).with_name("job_body.py")
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
