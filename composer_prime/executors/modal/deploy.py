"""From a job's settings to a deployed function of Modal: an app for each combination, found again by its name.

A deployed app's name holds a hash of all that it is made of, so two callers that deploy it at once make the same thing,
and a deployment never changes under a job that runs. It costs nothing while no job runs in it.
"""

import hashlib
import hmac
import importlib.util
import json
import logging
import shlex
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from composer_prime.errors import JobUnknown
from composer_prime.executors.base import JobSpec
from composer_prime.executors.installing import install_commands, stock_image
from composer_prime.executors.modal.client import Connection, modal_package
from composer_prime.executors.modal.limits import FREE_DISK_GIB, MAX_TIMEOUT_S, gpu_option
from composer_prime.executors.modal.records import PREFIX, Records, object_name

logger = logging.getLogger(__name__)

BODY = Path(__file__).with_name("job_body.py")
FUNCTION = "run_job"
STARTUP_TIMEOUT_S = 1800
"""To pull a large image and start; Modal's own default is the job's time-out, which may be seconds."""
TIMEOUT_MARGIN_S = 60
"""Modal's time-out comes so much after the container program's own, which ends the command gently and tells."""
_LOADING = threading.Lock()
WHEELS = "/tmp/composer-prime-wheels"
"""Where an image finds the wheels that it installs."""
DEFAULT_IMAGE = "Modal's Debian slim (no composer-prime in it)"


def settings(spec: JobSpec) -> dict[str, Any]:
    """What the function of this job is made of, in Modal's terms; secrets by name."""
    wanted = spec.resources
    memory_mib = None if wanted.memory_gib is None else int(wanted.memory_gib * 1024)
    image = spec.image or f"{DEFAULT_IMAGE}, Python {sys.version_info.major}.{sys.version_info.minor}"
    if spec.registry_secret is not None:
        image += f" (with the secret {spec.registry_secret})"
    found: dict[str, Any] = {
        "image": image if spec.packages is None else f"{stock_image(spec.packages)}, and on it {spec.packages}",
        "gpu": gpu_option(wanted),
        "region": wanted.region,
        "cloud": wanted.cloud,
        "nonpreemptible": wanted.nonpreemptible,
        # As much reserved as allowed: Modal bills what is used beyond a reservation.
        "cpu": None if wanted.cpus is None else (wanted.cpus, wanted.cpus),
        "memory": None if memory_mib is None else (memory_mib, memory_mib),
        "ephemeral_disk": None,
        "timeout": min(spec.timeout_s + TIMEOUT_MARGIN_S, MAX_TIMEOUT_S),
        "startup_timeout": STARTUP_TIMEOUT_S,
        "secrets": list(spec.secrets),
        "volumes": {path: volume_name(name) for name, path in sorted(spec.caches.items())},
    }
    if wanted.disk_gib is not None and wanted.disk_gib > FREE_DISK_GIB:
        found["ephemeral_disk"] = int(wanted.disk_gib * 1024)
    return found


def volume_name(cache: str) -> str:
    return f"{PREFIX}cache-{cache}"


def app_name(spec: JobSpec, salt: str) -> str:
    """The app's name: the same for the same settings, values of secrets and container program."""
    wheels = [wheel.sha256 for wheel in spec.packages.wheels()] if spec.packages else []
    made_of = {**settings(spec), "wheels": wheels, "secrets": spec.secrets.reveal(), "body": BODY.read_text()}
    text = json.dumps(made_of, sort_keys=True)
    return object_name(spec.run, hmac.new(salt.encode(), text.encode(), hashlib.sha256).hexdigest()[:12])


def deployed_function(connection: Connection, records: Records, spec: JobSpec) -> Any:
    """The `modal.Function` that runs such a job, deployed if it isn't yet, which bills nothing but an image's build.

    Raises BadInput for what Modal refuses (an image that can't be built), ExecutorError.
    """
    modal = modal_package()
    name = app_name(spec, records.salt())

    def look_up() -> Any:
        return modal.Function.from_name(name, FUNCTION, client=connection.client).hydrate()

    try:
        return connection.ask(f"app {name}", look_up)
    except JobUnknown:
        logger.info("modal app=%s deploying image=%s", name, spec.image)
    connection.ask(f"deployment of app {name}", lambda: _deploy(connection, name, spec))
    return connection.ask(f"app {name}", look_up)


def _deploy(connection: Connection, name: str, spec: JobSpec) -> None:
    modal = modal_package()
    app = modal.App(name)
    options = settings(spec)
    secrets = [modal.Secret.from_dict(spec.secrets.reveal())] if spec.secrets else []
    volumes = {
        path: modal.Volume.from_name(volume, create_if_missing=True) for path, volume in options["volumes"].items()
    }
    same = ("gpu", "region", "cloud", "nonpreemptible", "cpu", "memory", "ephemeral_disk", "timeout", "startup_timeout")
    with tempfile.TemporaryDirectory(prefix="wheels-") as folder:
        app.function(
            image=_image(spec, Path(folder)),
            secrets=secrets,
            volumes=volumes,
            # An attempt is one run of the command; what comes after a failure is the fleet's to say.
            retries=0,
            # Ends, and is no longer billed, with its one job.
            single_use_containers=True,
            **{option: options[option] for option in same},
        )(_body())
        app.deploy(client=connection.client)


def _image(spec: JobSpec, folder: Path) -> Any:
    """The image that is named; else the stock one with the job's packages in it, which Modal builds once and keeps.

    folder   for the wheels, until the app is deployed
    """
    modal = modal_package()
    if spec.packages is None:
        if spec.image is None:
            return modal.Image.debian_slim()
        login = None if spec.registry_secret is None else modal.Secret.from_name(spec.registry_secret)
        return modal.Image.from_registry(spec.image, secret=login)
    image, paths = modal.Image.from_registry(stock_image(spec.packages)), []
    for wheel in spec.packages.wheels():
        (folder / wheel.file).write_bytes(wheel.data)
        (folder / wheel.file).chmod(0o644)
        paths.append(f"{WHEELS}/{wheel.sha256[:12]}/{wheel.file}")
        image = image.add_local_file(folder / wheel.file, paths[-1], copy=True)
    backend = "cpu" if spec.resources.gpu is None else None  # no GPU is there to ask while an image is built
    return image.run_commands(*install_commands(spec.packages, [shlex.quote(path) for path in paths], backend))


def _body() -> Callable[..., Any]:
    """The container's function, as a module outside our package: Modal then sends its one file, and not the package.

    Not pickled (`serialized=True`), since the image's Python needn't be the one that launches.
    """
    with _LOADING:  # jobs are submitted from several threads, and a module is found before it is whole
        if BODY.stem not in sys.modules:
            spec = importlib.util.spec_from_file_location(BODY.stem, BODY)
            assert spec and spec.loader
            module = importlib.util.module_from_spec(spec)
            sys.modules[BODY.stem] = module
            spec.loader.exec_module(module)
        return getattr(sys.modules[BODY.stem], FUNCTION)
